"""Small values that cross processes by the hundred."""

from typing import Any


class ByFields:
    """A frozen dataclass with slots that is pickled as its fields in order, and made of them again.

    What such a class does by itself, it looks its fields up for each value, takes several times as long.
    """

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple([getattr(self, name) for name in self.__slots__])
