"""Taking the results of calls in, each with its rank, and saying what failed."""

import math
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from raycrew.cluster_core import Session
from raycrew.worker_groups._calls.answers.failures import has_died
from raycrew.worker_groups._calls.answers.recovery import Recovery
from raycrew.worker_groups._calls.answers.telling import Telling
from raycrew.worker_groups._calls.answers.waiting import (
    GRACE_S,
    Settled,
    await_some,
    by_rank,
    deadline_after,
    left,
    settle,
)
from raycrew.worker_groups._health import observed
from raycrew.worker_groups._ray import is_death, is_stored, raised_by, while_connected
from raycrew.worker_groups._worker import Join
from raycrew.worker_groups.errors import (
    GroupResizedError,
    ResultJoinError,
    ResultTimeoutError,
    WorkerFailureError,
    WorkerGroupError,
    combine,
)

_SLICE_S = 1.0
_LOOK_S = 0.02


class Gathering(Telling):
    """ObjectRefs of calls (or generators of them), and how their results are waited for."""

    called_workers: list[int]
    return_from_workers: list[int]
    is_stream: bool
    _recovery: Recovery | None
    _why: Sequence[str]
    _join: Join | None
    _deadline: float | None
    _arrived: list[tuple[int, Any]]
    _broken: dict[int, Exception]
    _looked: bool
    _open_streams: dict[int, Any]
    _next: dict[int, Any]
    _turns: threading.Lock

    @contextmanager
    def _turn(
        self, deadline: float | None = None, unless: Callable[[], bool] = lambda: False
    ) -> Iterator[bool]:
        """Alone among the threads that wait for this, as long as that thread wants its results.

        Gives whether it is: not where `unless` has come true meanwhile, for which nobody is waited for.

        Raises:
            ResultTimeoutError: Another one has its turn for too long.
        """
        while not self._turns.acquire(timeout=_LOOK_S):
            if unless():
                yield False
                return
            self._check()
            Session.check_wanted()
            if left(deadline) == 0.0:
                raise self._timed_out(self.called_workers)
        try:
            yield not unless()
        finally:
            self._turns.release()

    def _until(self, timeout: float | None) -> float | None:
        own, asked = self._deadline, deadline_after(timeout)
        return asked if own is None else own if asked is None else min(own, asked)

    def _gathered(self, deadline: float | None) -> dict[int, Any]:
        """Every result by rank, in one `ray.get` where all is well and quick; failures are found early."""
        if self.is_stream:
            items: dict[int, Any] = {rank: [] for rank in self.called_workers}
            for rank, item in self._stream(deadline):
                items[rank].append(item)
            return items
        self._check()
        refs = list(self)
        try:
            with while_connected(self._check) as session:
                values = session.get(refs, timeout=left(deadline, _SLICE_S))
        except Exception:  # noqa: BLE001 - what failed, or is late, is found out below with its rank
            values = self._values(settle(refs, deadline, self._check))
        return dict(zip(self.called_workers, values, strict=True))

    def _value(self, found: Mapping[int, Any]) -> Any:
        """The results of the ranks to return from, made one where the method declares how."""
        results = [found[rank] for rank in self.return_from_workers]
        return results if self._join is None else self._join(results)

    def _own(self, rank: int, result: Any) -> Any:
        """The result of a rank without what comes of added rows; as it is, where that can't be told apart."""
        if self._join is None or isinstance(result, WorkerGroupError):
            return result
        try:
            return self._join.without_padding(rank, result)
        except ResultJoinError:  # which `get_results` raises
            return result

    def _pairs(self, timeout: float | None) -> Generator[tuple[int, Any], None, None]:
        deadline, returning = self._until(timeout), set(self.return_from_workers)
        pairs, given = (self._stream if self.is_stream else self._in_turn), set[int]()
        while True:
            sent = list(self)
            try:
                for rank, value in pairs(deadline):
                    if rank in returning and (self.is_stream or rank not in given):
                        given.add(rank)
                        yield rank, self._own(rank, value)
            except WorkerFailureError as error:
                self._note_taken(ok=False)
                deadline = self._again(error, deadline, sent)
            else:
                self._note_taken(ok=True)
                return

    def _note_taken(self, *, ok: bool) -> None:
        """Tell whoever observes calls that the results of this one are there, or its failure."""
        if (observer := observed.by) is not None and self:
            observer.taken(self._own_id(), ok)

    def _in_turn(self, deadline: float | None) -> Iterator[tuple[int, Any]]:
        """Results as they come."""
        waiting = list(self)
        rank_of = dict(zip(waiting, self.called_workers, strict=True))
        while waiting:
            ready = await_some(waiting, deadline, self._check)
            if not ready:
                raise self._timed_out([rank_of[ref] for ref in waiting])
            waiting.remove(ready[0])
            try:
                with while_connected(self._check) as session:
                    value = session.get(ready[0])
            except Exception as error:
                refs = [*ready, *(() if is_death(error) else waiting)]
                settled = settle(refs, deadline, self._check)  # a cause may come after what follows from it
                settled.pending += range(len(refs), 1 + len(waiting))
                raise self._failed(by_rank(settled, [rank_of[r] for r in (*ready, *waiting)])) from error
            yield rank_of[ready[0]], value

    def _recovered(
        self, gather: Callable[[float | None], dict[int, Any]], deadline: float | None
    ) -> dict[int, Any]:
        """What is gathered, also of calls that were sent again because workers died."""
        while True:
            sent = list(self)
            try:
                found = gather(deadline)
            except WorkerFailureError as error:
                self._note_taken(ok=False)
                deadline = self._again(error, deadline, sent)
                continue
            self._note_taken(ok=not any(isinstance(value, WorkerGroupError) for value in found.values()))
            values = found.values() if gather == self._outcomes else ()
            errors = [value for value in values if isinstance(value, WorkerGroupError)]
            if not errors:
                self._recovery = None  # and with it what would have been sent again
            died = [e for e in errors if isinstance(e, WorkerFailureError) and has_died(e)]
            if not died:
                return found
            try:
                deadline = self._again(combine(died), deadline, sent)
            except (WorkerFailureError, GroupResizedError):  # the latter: they can't be sent again
                return found

    def _again(self, error: WorkerFailureError, deadline: float | None, sent: Sequence[Any]) -> float | None:
        """Go on with calls that were sent again in place of those that failed.

        Args:
            error: What became of them.
            deadline: The caller's.
            sent: Those that failed; another thread may have seen to them already.

        Returns:
            The deadline, later by the time that this has taken.

        Raises:
            WorkerFailureError: That error, if they were not.
        """
        recovery = self._recovery  # first: it goes only after calls that were lost have been replaced
        if not has_died(error) or (recovery is None and list(self) == sent):
            for note in self._why:
                error.add_note(note)
            raise error
        if self.is_stream and recovery is not None:  # never sent again: there is no turn to wait for
            recovery.after(error, lambda: True)
            raise error
        begin = time.monotonic()
        with self._turn():
            if recovery is not None and list(self) == sent:
                again = recovery.after(error, lambda: True)
                if again is None:
                    raise error
                self[:], self._places = again, again._places  # noqa: SLF001 - of the same class
                if self._deadline is not None:
                    self._deadline += time.monotonic() - begin
        return None if deadline is None else deadline + time.monotonic() - begin

    def _outcomes(self, deadline: float | None) -> dict[int, Any]:
        """By rank a result, or the error that stands for it."""
        self._check()
        if self.is_stream:
            with suppress(ResultTimeoutError):
                while self._open_streams:
                    self._take_in(deadline, lambda: not self._open_streams)
            found: dict[int, Any] = {rank: [] for rank in self.called_workers}
            for rank, item in self._arrived:
                found[rank].append(item)
            errors = dict(self._broken)
            pending = [rank for rank in list(self._open_streams) if rank not in errors]
        else:
            ranks = self.called_workers
            settled = settle(list(self), deadline, self._check, grace_s=math.inf)
            found = {ranks[i]: value for i, value in settled.values.items()}
            errors = {ranks[i]: error for i, error in settled.errors.items()}
            pending = [ranks[i] for i in settled.pending]
        found |= self._failed_each(errors)
        return found | {rank: self._timed_out([rank]) for rank in pending}

    def _values(self, settled: Settled) -> list[Any]:
        if settled.errors:
            raise self._failed(by_rank(settled, self.called_workers))
        if settled.pending:
            raise self._timed_out([self.called_workers[i] for i in settled.pending])
        return [settled.values[i] for i in range(len(self))]

    def _stream(self, deadline: float | None) -> Iterator[tuple[int, Any]]:
        """Items that came before, whoever took them in, then new ones as they come."""
        given = 0

        def has_news() -> bool:
            return len(self._arrived) > given or bool(self._broken) or not self._open_streams

        while True:
            while given < len(self._arrived):
                given += 1
                yield self._arrived[given - 1]
            if self._broken:
                raise self._failed(self._what_broke())
            if not self._open_streams:
                if given == len(self._arrived):
                    return
                continue
            self._take_in(deadline, has_news)

    def _what_broke(self) -> Settled:
        """Once one stream is broken, others get a moment to break too, for they may be the cause.

        This waits for no turn: whoever waits for all outcomes may have that for long.
        """
        if not self._looked and not any(map(is_death, list(self._broken.values()))):
            streams = dict(self._open_streams)
            ends = [stream.completed() for stream in streams.values()]
            self._broken |= by_rank(settle(ends, deadline_after(GRACE_S), self._check), list(streams)).errors
            self._looked = True
        errors = dict(self._broken)
        return Settled(errors=errors, pending=sorted(self._open_streams.keys() - errors))

    def _take_in(self, deadline: float | None, has_news: Callable[[], bool]) -> None:
        """One more item, or the end of a stream, unless others have brought news meanwhile."""
        with self._turn(deadline, has_news) as is_own:
            if not is_own:
                return
            rank = next(iter(self._next), None)
            if rank is None:
                rank = self._ready_stream(deadline)
            try:
                with while_connected(self._check) as session:
                    if rank not in self._next:  # else whoever asked for it was cancelled
                        self._next[rank] = next(self._open_streams[rank])
                    item = session.get(self._next[rank])
                del self._next[rank]
                self._arrived.append((rank, item))
            except StopIteration:
                del self._open_streams[rank]
            except Exception as error:  # noqa: BLE001 - told now and at every later look, with its rank
                self._next.pop(rank, None)
                del self._open_streams[rank]
                self._broken[rank] = error

    def _ready_stream(self, deadline: float | None) -> int:
        rank_of = {stream: rank for rank, stream in self._open_streams.items()}
        ready = await_some(list(rank_of), deadline, self._check)
        if not ready:
            raise self._timed_out(sorted(self._open_streams))
        return rank_of[ready[0]]

    # For balancers.

    def _hand_over(self) -> None:
        """Leave it to the sender to send this again, to another worker."""
        if self._recovery is not None:
            self._recovery = self._recovery.handed_over()

    @property
    def _ends(self) -> list[Any]:
        """What is ready when a call has ended: its result, or the end of its stream."""
        return [call.completed() for call in self] if self.is_stream else list(self)

    def _wait_for(
        self, ends: Sequence[Any], count: int, timeout: float | None, *, fetch_local: bool = False
    ) -> Collection[Any]:
        """Wait for as many of some `_ends` and no longer than `timeout`; gives those that are ready.

        What is about to be taken is better fetched to this node meanwhile; else it stays where it is.
        """
        deadline = deadline_after(timeout)
        return await_some(ends, deadline, self._check, count=count, fetch_local=fetch_local)

    def _note_loss(self) -> None:
        """Tell whoever sent this that its worker was lost."""
        if self._recovery is not None:
            self._recovery.note_loss()

    def _died(self, end: Any) -> bool:
        """Whether the worker of one of `_ends` that is ready was lost with the call.

        A large result is not loaded: another worker may be meant to have it.
        """
        with while_connected(self._check):
            if is_stored(end):
                return False
            return (error := raised_by(end, self._check)) is not None and is_death(error)
