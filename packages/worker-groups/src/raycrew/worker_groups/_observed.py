"""What this process observes of its calls, when it does; when not, that costs one look here.

Standard library only, and below everything that has something to tell.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Detail = Mapping[str, str | int | float]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took its time.

    Attributes:
        track: What it belongs to: a group's name, "driver", "fan_out", "weights".
        row: Whose it is there: "rank 0", or a node.
        name: What was done.
        kind: "queued", "running", "waiting", or another phase.
        start: In seconds of this process's monotonic clock.
        end: Not before the start.
        detail: Numbers and names that belong to it.
    """

    track: str
    row: str
    name: str
    kind: str
    start: float
    end: float
    detail: Detail = field(default_factory=dict)


class Observer(Protocol):
    """Whoever is told. No method waits for anything, but the first call of a group's workers."""

    def about_to_send(self, group: str, places: Mapping[int, Any]) -> float:
        """Calls will be sent to some workers: those of `places`. Gives the time of the monotonic clock."""
        ...

    def sent(self, at: float, group: str, method: str, ranks: Sequence[int], calls: Sequence[bytes]) -> None:
        """A call of a method was sent to some ranks, as calls with these ids."""
        ...

    def ran(
        self, call: bytes, group: str, rank: int, method: str, began: float, ended: float, paused_s: float
    ) -> None:
        """A worker of this process was in a call."""
        ...

    def labelled(self, call: bytes, label: str) -> None:
        """A call was sent on behalf of something else than its caller."""
        ...

    def taken(self, call: bytes, ok: bool) -> None:
        """Whoever waited for a call has its results, or its failure."""
        ...

    def spanned(self, span: Span) -> None:
        """Something else is over."""
        ...

    def counted(self, name: str, labels: Mapping[str, str], value: float = 1.0) -> None:
        """Something has happened, that often or that much."""
        ...

    def look(self) -> None:
        """Workers are about to end: what they know is to be asked for now."""
        ...


class Observed:
    """Who is told.

    Attributes:
        by: None while nobody is.
    """

    by: Observer | None = None


observed = Observed()
