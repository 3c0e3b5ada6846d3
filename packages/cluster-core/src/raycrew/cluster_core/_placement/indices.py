"""Which of several things somebody names; pure."""

from collections.abc import Sequence
from numbers import Integral
from typing import TypeVar

T = TypeVar("T")


def at(those: Sequence[T], index: int, what: str) -> T:
    """One of several; none is counted from the end.

    Raises:
        IndexError: There is none.
    """
    if not 0 <= index < len(those):
        raise IndexError(f"{what} {index!r} is outside 0 to {len(those) - 1}")
    return those[index]


def check_indices(indices: Sequence[int], n_bundles: int) -> None:
    """Refuse bundle indices that are no integers, out of range or repeated.

    Raises:
        TypeError: An index is not an integer.
        ValueError: An index is out of range or repeated, or there is none.
    """
    if not indices:
        raise ValueError("no bundle indices were given; None stands for all bundles")
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, (int, Integral)):
            raise TypeError(f"bundle index {index!r} is a {type(index).__name__}, not an integer")
        if not 0 <= index < n_bundles:
            raise ValueError(f"bundle index {index} is outside 0 to {n_bundles - 1}")
    if len(set(indices)) < len(indices):
        repeated = sorted({index for index in indices if list(indices).count(index) > 1})
        raise ValueError(f"bundle indices {repeated} are repeated")
