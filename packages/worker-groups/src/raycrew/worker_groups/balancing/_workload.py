"""What the workers of a group have to do: the calls that each was sent, and whether it is lost."""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from raycrew.worker_groups._calls import MultiWorkerFuture, deadline_after, left
from raycrew.worker_groups._health import observed
from raycrew.worker_groups._ray import is_death
from raycrew.worker_groups.balancing._strategies import WorkerLoad
from raycrew.worker_groups.balancing._stream import GoneWorkerError, Item, LostWorkerError
from raycrew.worker_groups.errors import (
    GroupResizedError,
    WorkerFailureError,
    WorkerGroupClosedError,
    WorkerGroupError,
)
from raycrew.worker_groups.sharding import RankInfo

REPORT_INTERVAL_S = 2.0


class BalancedGroup(Protocol):
    """A group as a balancer sees it."""

    @property
    def name(self) -> str:
        """Name of the group."""
        ...

    @property
    def ranks(self) -> Sequence[RankInfo]:
        """Where each rank is; a restarted worker has another generation."""
        ...

    @property
    def tied_workers_groups(self) -> Sequence[Sequence[int]]:
        """Ranks of each tied group, leader first."""
        ...

    def on(self, ranks: Sequence[int], *, timeout: float | None = None) -> Any:
        """Some ranks, with `call(method, *args, **kwargs)`."""
        ...


@dataclass(eq=False, slots=True)
class Sent:
    """A call that was sent to one worker."""

    rank: int
    generation: int
    future: MultiWorkerFuture[Any]
    deadline: float | None

    @property
    def end(self) -> Any:
        """What is ready when the call has ended."""
        return self.future._ends[0]  # noqa: SLF001 - made for this


class Workload:
    """Of one group, as far as its calls went through here; may be used from several threads.

    Args:
        group: The group.
        idempotent_methods: Methods that may run twice.
        usage: Resource use by rank; asked at most every two seconds.
        absent: Ranks to leave out for now; where it is given, items of a lost worker go to another at once.
    """

    def __init__(
        self,
        group: BalancedGroup,
        idempotent_methods: Iterable[str],
        usage: Callable[[], Mapping[int, float]] | None,
        absent: Callable[[], Collection[int]] | None = None,
    ) -> None:
        if isinstance(idempotent_methods, str):
            raise TypeError(f"idempotent_methods is a sequence of names, as in [{idempotent_methods!r}]")
        self._group = group
        self._idempotent = frozenset(idempotent_methods)
        self._usage = usage
        self._absent = absent
        self._reported: Mapping[int, float] = {}
        self._reported_at = float("-inf")
        self._sent_since: Counter[int] = Counter()
        self._outstanding: Counter[int] = Counter()
        self._singles: list[Sent] = []
        self._lost: dict[int, int] = {}
        self._own_lock, self._pid = threading.RLock(), os.getpid()

    @property
    def _lock(self) -> AbstractContextManager[Any]:
        """One thread at a time, of the group's process: whoever held it before a fork is not there after."""
        if os.getpid() != self._pid:
            whose = f"the balancer of {self._group.name!r} is of the process that this one was forked from"
            raise WorkerGroupClosedError(whose)
        return self._own_lock

    def loads(self) -> list[WorkerLoad]:
        """What is known of each living worker now, in rank order.

        Raises:
            WorkerGroupError: All workers are lost.
        """
        with self._lock:
            self._reap_singles()
            self._refresh_usage()
            loads = [
                WorkerLoad(rank, self._outstanding[rank], self._reported.get(rank), self._sent_since[rank])
                for rank in self._living()
            ]
        if not loads:
            raise WorkerGroupError(f"every worker of {self._group.name!r} is lost")
        return loads

    def may_go_again(self, method: str) -> bool:
        """Whether a method is declared idempotent."""
        return method in self._idempotent

    def send(
        self, rank: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], timeout: float | None
    ) -> Sent:
        """Send one call to one worker and count it; waits where that one is being replaced.

        Raises:
            GoneWorkerError: It has left the group since it was chosen; nothing was sent.
        """
        self._count(rank, 1)
        return self._send_counted(rank, method, args, kwargs, timeout)

    def _send_counted(
        self, rank: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], timeout: float | None
    ) -> Sent:
        try:
            return self._sent(rank, method, args, kwargs, timeout)
        except BaseException:
            self._count(rank, -1)
            raise

    def _sent(
        self, rank: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], timeout: float | None
    ) -> Sent:
        try:
            future = self._group.on([rank], timeout=timeout).call(method, *args, **kwargs)
        except ValueError as error:
            if isinstance(error, GroupResizedError) or rank not in self._leaders():
                raise GoneWorkerError from error
            raise
        if self._absent is not None:
            future._hand_over()  # noqa: SLF001 - made for this
        if (observer := observed.by) is not None:
            observer.labelled(future._own_id(), "balancer")  # noqa: SLF001 - made for this
        place = future._places.get(rank)  # noqa: SLF001 - of whom it was sent to, whoever they are by now
        known = None if place is None else place.info
        generation = self._generations()[rank] if known is None else known.generation
        return Sent(rank, generation, future, deadline_after(timeout))

    def _count(self, rank: int, calls: int) -> None:
        with self._lock:
            self._outstanding[rank] += calls
            self._sent_since[rank] = max(0, self._sent_since[rank] + calls)  # a report may have come since

    def returned(self, sent: Sent) -> None:
        """Count a call as returned."""
        with self._lock:
            self._outstanding[sent.rank] -= 1

    def lose(self, sent: Sent) -> None:
        """Send nothing more to a worker until it is restarted."""
        with self._lock:
            self._lost[sent.rank] = max(sent.generation, self._lost.get(sent.rank, 0))  # it may be late

    def _leaders(self) -> list[int]:
        return sorted(group[0] for group in self._group.tied_workers_groups)

    def _generations(self) -> dict[int, int]:
        return {info.rank: info.generation for info in self._group.ranks}

    def _living(self) -> list[int]:
        now, absent = self._generations(), () if self._absent is None else self._absent()
        here = [rank for rank in self._leaders() if rank in now and rank not in absent]
        return [rank for rank in here if self._lost.get(rank) != now[rank]]

    def _reap_singles(self) -> None:
        if not self._singles:
            return
        for sent in ended_of(self._singles, len(self._singles), timeout_s=0):
            self._singles.remove(sent)
            self.returned(sent)
            if sent.future._died(sent.end):  # noqa: SLF001
                sent.future._note_loss()  # noqa: SLF001
                self.lose(sent)

    def _refresh_usage(self) -> None:
        if self._usage is not None and time.monotonic() - self._reported_at >= REPORT_INTERVAL_S:
            self._reported = dict(self._usage())
            self._reported_at = time.monotonic()
            self._sent_since.clear()


@dataclass
class StreamedCalls:
    """The workers of a group, for one stream of calls of one method; see `Workers`."""

    workload: Workload
    method: str
    timeout_s: float | None
    common_kwargs: Mapping[str, Any]

    def loads(self) -> Sequence[WorkerLoad]:
        """See `Workers`."""
        return self.workload.loads()

    def send(self, rank: int, item: Item) -> Sent:
        """See `Workers`."""
        return self.workload.send(rank, self.method, (item.value,), self.common_kwargs, self.timeout_s)

    def wait(self, sent: Sequence[Sent]) -> Sequence[Sent]:
        """See `Workers`."""
        deadlines = [one.deadline for one in sent if one.deadline is not None]
        timeout_s = left(min(deadlines)) if deadlines else None
        done = ended_of(sent, 1, timeout_s, fetch_local=True)
        if not done:  # its time is over: collecting it says so
            return [min((one for one in sent if one.deadline is not None), key=lambda one: one.deadline or 0)]
        return done

    def collect(self, sent: Sent) -> Any:
        """See `Workers`."""
        self.workload.returned(sent)
        try:
            return sent.future.get_results()[0]
        except GroupResizedError as error:  # it died, and was not sent again: the group has another size
            raise LostWorkerError from error
        except WorkerFailureError as error:
            if error.cause is not None and is_death(error.cause):
                self.workload.lose(sent)
                if self.workload.may_go_again(self.method):
                    raise LostWorkerError from error
            raise

    def abandon(self, sent: Sequence[Sent]) -> None:
        """See `Workers`."""
        for one in sent:
            self.workload.returned(one)
            one.future.cancel()


def ended_of(
    sent: Sequence[Sent], count: int, timeout_s: float | None, *, fetch_local: bool = False
) -> list[Sent]:
    """Those of some calls that have ended, once as many have or the time is over."""
    by_end = {one.end: one for one in sent}
    done = sent[0].future._wait_for(  # noqa: SLF001
        list(by_end), count, timeout_s, fetch_local=fetch_local
    )
    return [by_end[end] for end in done]
