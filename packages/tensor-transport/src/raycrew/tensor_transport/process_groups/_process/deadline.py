"""How long something may still take."""

import math
import time
from dataclasses import dataclass, field
from typing import Self


@dataclass(frozen=True, slots=True)
class Deadline:
    """`timeout_s` seconds from the moment at which it was made."""

    timeout_s: float
    _end: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_end", time.monotonic() + self.timeout_s)

    @classmethod
    def within(cls, timeout_s: float) -> Self:
        """A deadline that a caller gave.

        Raises:
            ValueError: It is no positive number of seconds.
        """
        if isinstance(timeout_s, bool) or not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s is a positive number of seconds, not {timeout_s!r}")
        return cls(timeout_s)

    @property
    def left_s(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether nothing is left."""
        return time.monotonic() >= self._end
