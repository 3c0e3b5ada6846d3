"""The keys under which samples were put, so that a put that is made again adds none twice. Pure."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence


class Keys:
    """The numbers of the samples that were put last, by key.

    Args:
        most: How many keys are remembered: the oldest is forgotten for a new one. None for all.

    Attributes:
        most: The same.
        newest: The highest number of a sample that had a key, remembered or not; -1 for none.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most, self.newest = most, -1
        self._ids: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._ids

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self._ids.items())

    def id_of(self, key: str) -> int | None:
        """The number of the sample that was put under a key, where that is known."""
        return self._ids.get(key)

    def ids_of(self, keys: Sequence[str]) -> list[int | None]:
        """The same for several."""
        return [self._ids.get(key) for key in keys]

    def note(self, key: str, sample: int) -> None:
        """A sample was put under a key, which is the newest now, also where it was known."""
        self._ids[key] = sample
        self._ids.move_to_end(key)
        self.newest = max(self.newest, sample)
        self.bound(self.most)

    def bound(self, most: int | None) -> None:
        """Remember so many from now on."""
        self.most = most
        while most is not None and len(self._ids) > most:
            self._ids.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        self._ids.clear()
