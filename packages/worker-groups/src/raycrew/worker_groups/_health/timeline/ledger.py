"""Puts together what the driver and the workers know of calls. Pure.

A call is open until each of its ranks has told when it ran and whoever waited for it has its results, or as
long as there is hope for that.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from raycrew.worker_groups._health.timeline.records import Call, Part

#: What an open call waits for a worker that does not tell, or for somebody who takes its results.
PATIENCE_S = 5.0
#: What ended calls that nobody here has sent wait for the note that somebody has.
_STRAY_S = 1.0
#: How many ranks of calls that were closed without them may tell of it later.
MOST_LATE = 10_000


class Ran(NamedTuple):
    """When a worker was in a call, by the driver's clock.

    Attributes:
        call: The call's id.
        group: Name of the worker's group.
        rank: Of the worker.
        method: Name of the method.
        began: When the method began.
        ended: When it was over.
        paused_s: Seconds that a stream waited for its consumer meanwhile.
    """

    call: bytes
    group: str
    rank: int
    method: str
    began: float
    ended: float
    paused_s: float = 0.0


class Gone(NamedTuple):
    """A worker that has ended, and has told of all that it ran; or whose node is gone, with what it noted.

    Attributes:
        group: Name of its group.
        rank: Its rank.
        before: Calls that were sent until then were its own; by the driver's clock.
    """

    group: str
    rank: int
    before: float


@dataclass(eq=False, slots=True)
class _Open:
    group: str
    method: str
    sent: float
    parts: dict[bytes, Part | int]
    untold: int
    since: float
    taken: float | None = None
    ok: bool | None = None
    label: str = ""
    context: Any = None

    def tell(self, ran: Ran) -> None:
        parts, call = self.parts, ran.call
        self.untold -= isinstance(parts[call], int)
        parts[call] = _part(ran)

    def give_up(self, now: float, rank: int) -> None:
        """A rank will tell no more."""
        for call in [call for call, part in self.parts.items() if part == rank]:
            self.parts[call] = Part(rank)
            self.untold -= 1
            self.since = max(self.since, now)

    def closed(self) -> Call:
        parts = tuple([Part(part) if isinstance(part, int) else part for part in self.parts.values()])
        outcome = self.taken, self.ok, self.label, self.context
        return Call(self.group, self.method, self.sent, parts, *outcome)


@dataclass(eq=False, slots=True)
class _Late:
    """A call that was closed before all its ranks had told of it, as listeners know it."""

    opened: _Open
    told: Call


class Ledger:
    """All calls that are open.

    Args:
        closed: Told of each call that is no longer.
        amended: Told of a call that was closed, as it was and as it is, when a rank tells of it later.
        most: How many ranks' parts of open calls there may be; the oldest call is closed as it is known where
            there would be more.
    """

    def __init__(
        self,
        closed: Callable[[Call], object],
        amended: Callable[[Call, Call], object],
        most: int = 200_000,
    ) -> None:
        self._closed, self._amended = closed, amended
        self._late: dict[bytes, _Late] = {}
        self._most, self._n_parts = most, 0
        self._open: dict[bytes, _Open] = {}
        self._calls: dict[_Open, None] = {}
        self._strays: dict[tuple[bytes, int], tuple[float, Ran]] = {}

    def sent(
        self,
        at: float,
        group: str,
        method: str,
        ranks: Sequence[int],
        calls: Sequence[bytes],
        context: Any = None,
    ) -> None:
        """A call was sent to some ranks, each of which has an id for it, in some context."""
        parts: dict[bytes, Part | int] = dict(zip(calls, ranks, strict=True))
        opened = _Open(group, method, at, parts, len(parts), since=at, context=context)
        self._calls[opened] = None
        self._n_parts += len(parts)
        for call, rank in zip(calls, ranks, strict=True):
            self._open[call] = opened
            if self._strays and (stray := self._strays.pop((call, rank), None)) is not None:
                self.ran(*stray)
        while self._n_parts > self._most and len(self._calls) > 1:
            self._close(next(iter(self._calls)))

    def ran(self, now: float, ran: Ran) -> None:
        """A worker has told when it was in a call."""
        opened = self._open.get(ran.call)
        if opened is not None:
            opened.tell(ran)
            if now > opened.since:
                opened.since = now
            self._close_complete(opened)
        elif (late := self._late.pop(ran.call, None)) is not None:
            self._amend(late, ran)
        else:
            self._strays[ran.call, ran.rank] = now, ran

    def gone(self, now: float, gone: Gone) -> None:
        """A worker has ended: it is in none of the calls that it has not told of."""
        for opened in list(self._calls):
            if opened.group == gone.group and opened.sent < gone.before:
                opened.give_up(now, gone.rank)
                self._close_complete(opened)

    def taken(self, at: float, call: bytes, ok: bool) -> None:
        """Somebody has the results of the call that one of its ranks knows by this id."""
        opened = self._open.get(call)
        if opened is not None and opened.taken is None:
            opened.taken, opened.ok = at, ok
            opened.since = max(opened.since, at)
            self._close_complete(opened)

    def labelled(self, call: bytes, label: str) -> None:
        """What a call was sent for."""
        if (opened := self._open.get(call)) is not None:
            opened.label = label

    def settle(self, now: float) -> None:
        """Close what has been open for too long."""
        for opened in list(self._calls):
            is_known = not opened.untold or opened.taken is not None
            if is_known and now - opened.since > PATIENCE_S:
                self._close(opened)
        for key, (at, ran) in list(self._strays.items()):
            if now - at > _STRAY_S:
                del self._strays[key]
                self._closed(_elsewhere(ran))

    def open_calls(self) -> Iterator[tuple[str, int]]:
        """By group, how many calls have ranks that have not ended them, as far as is known."""
        counts: dict[str, int] = {}
        for opened in self._calls:
            is_open = opened.taken is None and opened.untold > 0
            counts[opened.group] = counts.get(opened.group, 0) + is_open
        yield from counts.items()

    def unfinished(self) -> Iterator[Call]:
        """All calls that are open, as they are known."""
        yield from (opened.closed() for opened in self._calls)
        yield from (_elsewhere(ran) for _, ran in self._strays.values())

    def _close_complete(self, opened: _Open) -> None:
        if not opened.untold and opened.taken is not None:
            self._close(opened)

    def _close(self, opened: _Open) -> None:
        del self._calls[opened]
        self._n_parts -= len(opened.parts)
        for call in opened.parts:
            del self._open[call]
        closed = opened.closed()
        if opened.untold:
            untold = [call for call, part in opened.parts.items() if isinstance(part, int)]
            self._late |= dict.fromkeys(untold, _Late(opened, closed))
            while len(self._late) > MOST_LATE:
                del self._late[next(iter(self._late))]
        self._closed(closed)

    def _amend(self, late: "_Late", ran: Ran) -> None:
        before = late.told
        late.opened.tell(ran)
        late.told = late.opened.closed()
        self._amended(before, late.told)


def _part(ran: Ran) -> Part:
    return Part(ran.rank, ran.began, ran.ended, ran.paused_s)


def _elsewhere(ran: Ran) -> Call:
    """A call that another process has sent."""
    return Call(ran.group, ran.method, None, (_part(ran),), label="another process")
