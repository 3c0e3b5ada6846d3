"""What was asked of the pool ahead, to be given up with a call that it is for."""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

#: Of a function and of its initializer.
Keys = tuple[str, str | None]

_KEPT = 64  # most have ended long since


@dataclass(frozen=True, eq=False)
class Ahead:
    """A call without items.

    Attributes:
        call_id: What hosts know it by.
        keys: Of what it loads.
        members: The hosts that were asked.
    """

    call_id: str
    keys: Keys
    members: Sequence[Any]

    def prepares(self, keys: Keys) -> bool:
        """Whether it is of the same initializer, or, where there is none, of the same function."""
        return self.keys[1] == keys[1] and (keys[1] is not None or self.keys[0] == keys[0])


class Asked:
    """The last such calls; every method may be called from any thread."""

    def __init__(self) -> None:
        self._calls: deque[Ahead] = deque(maxlen=_KEPT)

    def note(self, ahead: Ahead) -> None:
        """Remember one."""
        self._calls.append(ahead)

    def take(self, keys: Keys) -> list[Ahead]:
        """Those that prepare a call of these, which are forgotten."""
        found = [ahead for ahead in list(self._calls) if ahead.prepares(keys)]
        for ahead in found:
            with suppress(ValueError):  # another thread has taken it
                self._calls.remove(ahead)
        return found
