"""In which order samples are handed out: by a key that follows from the number of a sample alone. Pure."""

from typing import Protocol

_MASK = (1 << 64) - 1


class Order(Protocol):
    """Numbers of samples as keys, and back; the smallest key comes first."""

    def key(self, sample: int) -> int:
        """The key of a sample."""
        ...

    def sample(self, key: int) -> int:
        """The sample of a key."""
        ...


class Arrival:
    """In the order in which samples came."""

    def key(self, sample: int) -> int:
        """See `Order`."""
        return sample

    def sample(self, key: int) -> int:
        """See `Order`."""
        return key


class Shuffled:
    """Shuffled within windows of so many samples that came one after another.

    Args:
        seed: The same seed gives the same order.
        window: How many.
    """

    def __init__(self, seed: int, window: int) -> None:
        self._seed, self._window = _mixed(seed & _MASK), window

    def key(self, sample: int) -> int:
        """See `Order`: the window, something random, and the place in the window."""
        window, place = divmod(sample, self._window)
        return (window << 128) | (_mixed(self._seed ^ sample) << 64) | place

    def sample(self, key: int) -> int:
        """See `Order`."""
        return (key >> 128) * self._window + (key & _MASK)


def _mixed(x: int) -> int:
    """Sebastiano Vigna's splitmix64: one step of it, from any state."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def order_of(seed: int | None, window: int) -> Order:
    """The order of a queue."""
    return Arrival() if seed is None else Shuffled(seed, window)
