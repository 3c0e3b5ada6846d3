"""Calls as they are known once they are over, and the spans that they make. Pure."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from raycrew.worker_groups._health.observers import Span

#: Of a rank, in the order in which a call goes through them.
QUEUED, RUNNING, WAITING = "queued", "running", "waiting"
#: Of a call of which a worker has not told when it ran.
UNTOLD = "untold"
DRIVER = "driver"

#: When a listener wants to be told of calls: now, later when somebody looks, or of no more.
Wants = Literal["now", "later", "nothing"]
NOW: Wants = "now"
LATER: Wants = "later"
NOTHING: Wants = "nothing"


class Part(NamedTuple):
    """What one rank did for a call; times are of the driver's monotonic clock, as far as that is known.

    Attributes:
        rank: Which one.
        began: When the method began; None where its worker has not told.
        ended: When it was over.
        paused_s: Seconds that a stream waited for its consumer meanwhile.
    """

    rank: int
    began: float | None = None
    ended: float | None = None
    paused_s: float = 0.0


class Call(NamedTuple):
    """A method called on some ranks.

    Attributes:
        group: Name of the group.
        method: Name of the method.
        sent: When; None where another process called.
        parts: One per rank.
        taken: When whoever waited for it had its results; None where nobody has.
        ok: Whether it went well; None where that is not known.
        label: What it was sent for: "balancer", or nothing.
        context: What was captured when it was sent.
    """

    group: str
    method: str
    sent: float | None
    parts: tuple[Part, ...]
    taken: float | None = None
    ok: bool | None = None
    label: str = ""
    context: Any = None

    @property
    def start(self) -> float | None:
        """When it was sent, or where that is not known, when its first rank began."""
        known = [part.began for part in self.parts if part.began is not None]
        return min(known, default=None) if self.sent is None else self.sent

    @property
    def ended(self) -> float | None:
        """When the last rank was done, of those that have told."""
        return max((end for part in self.parts if (end := _run(self, part)[1]) is not None), default=None)

    def running(self) -> dict[int, tuple[float, float]]:
        """By rank, when the method began and ended there, of those that have told."""
        runs = {part.rank: _run(self, part) for part in self.parts}
        return {r: (b, e) for r, (b, e) in runs.items() if b is not None and e is not None}


def spans_of(call: Call) -> Iterator[Span]:
    """What is drawn of a call: of each rank that it was queued, ran, and waited for the slowest; and whole.

    Clocks of nodes are known to a bound only: what would begin before it was sent, begins when it was.
    """
    start, last = call.start, call.ended
    if start is None:
        return
    until = max(t for t in (start, last, call.taken) if t is not None)
    for part in call.parts:
        yield from _spans_of_part(call, part, start, until if last is None else last)
    if call.sent is not None:
        detail: dict[str, str | int | float] = {"ranks": len(call.parts)}
        if call.ok is not None:
            detail["outcome"] = "ok" if call.ok else "failed"
        if call.label:
            detail["for"] = call.label
        yield Span(DRIVER, call.group, call.method, "call", start, until, detail)


def _spans_of_part(call: Call, part: Part, start: float, last: float) -> Iterator[Span]:
    row, (began, ended) = f"rank {part.rank}", _run(call, part)
    if began is None or ended is None:
        yield Span(call.group, row, call.method, UNTOLD, start, max(start, call.taken or last))
        return
    if began > start:
        yield Span(call.group, row, call.method, QUEUED, start, began)
    detail = {"paused_s": part.paused_s} if part.paused_s else {}
    yield Span(call.group, row, call.method, RUNNING, began, ended, detail)
    if last > ended:
        yield Span(call.group, row, call.method, WAITING, ended, last)


def _run(call: Call, part: Part) -> tuple[float, float] | tuple[None, None]:
    if part.began is None or part.ended is None:
        return None, None
    began = part.began if call.sent is None else max(call.sent, part.began)
    return began, max(began, part.ended)
