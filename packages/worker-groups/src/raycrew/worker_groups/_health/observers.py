"""What this process observes of its calls, when it does; when not, that costs one look here.

Standard library only, and below everything that has something to tell.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

logger = logging.getLogger(__name__)

#: How long workers are asked for what they know, where nobody says how long.
LOOK_WITHIN_S = 2.0

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

    def look(self, timeout_s: float = LOOK_WITHIN_S) -> None:
        """Workers are about to end: what they know is to be asked for now, for so long at most."""
        ...


class Observed:
    """Who is told.

    Attributes:
        by: None while nobody is.
    """

    by: Observer | None = None


observed = Observed()


def _observe_nothing() -> None:
    observed.by = None


# What a forked process does is told by nobody: the thread that would is its parent's, and so are its locks.
os.register_at_fork(after_in_child=_observe_nothing)


def look_before_end(left_s: float | None) -> None:
    """Have whoever observes ask workers that are about to end; an error of its is logged, as they end anyway.

    Args:
        left_s: Seconds that this may take; None for as long as it takes.
    """
    within_s = LOOK_WITHIN_S if left_s is None else min(left_s, LOOK_WITHIN_S)
    if (observer := observed.by) is None or within_s <= 0:
        return
    try:
        observer.look(within_s)
    except Exception:
        logger.exception("what workers did last is not known")
