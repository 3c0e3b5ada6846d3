"""The states of a group behind one lock: who may call, restart and end it, and who waits for whom.

A group is starting until its constructor returns, then open; restarting and open again; closing, closed.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Literal, NamedTuple
from weakref import WeakSet

from raycrew.cluster_core import Session
from raycrew.worker_groups._group.life.once import Once
from raycrew.worker_groups._group.life.waiting_for import SLICE_S, is_done, warn_in_loop
from raycrew.worker_groups.errors import ResultTimeoutError, WorkerGroupClosedError, WorkerGroupError

logger = logging.getLogger(__name__)

State = Literal["starting", "open", "restarting", "closing", "closed"]

#: A restart that is told to give up ends the workers that it made; so long is waited for that.
UNWIND_S = 30.0

_LOOK_S = 0.002


class _Running(NamedTuple):
    """A restart: what becomes of it, how it is called, and whether it has a thread of its own."""

    outcome: "Future[list[int]]"
    name: str
    apart: bool


class _Sender:
    """Stands for one call that is being sent."""


class Lifecycle:
    """The state of one group.

    Args:
        name: The group's name, for errors.
        state: What it begins with.
    """

    def __init__(self, name: str, state: State = "starting") -> None:
        self._name = name
        self._lock = threading.RLock()
        self._state = state
        self._restart: _Running | None = None
        self._restarter = 0
        self._replaced: frozenset[int] = frozenset()
        self._others = Future[None]()  # done once others are replaced
        self._senders = WeakSet[_Sender]()  # so that none stays that was interrupted where it would leave
        self._end = Once(self._lock, self._closing, self._closed)
        self._ends = threading.Event()
        self._pid = os.getpid()

    @property
    def state(self) -> State:
        """What the group is doing."""
        return self._state

    @property
    def replaced(self) -> frozenset[int]:
        """The ranks on which calls wait at the moment."""
        return self._replaced

    @property
    def _is_forked(self) -> bool:
        """Whether threads and connections of the group's process are missing in this one."""
        return os.getpid() != self._pid

    def opened(self) -> None:
        """The start-up has succeeded."""
        self._state = "open"

    def check(self) -> None:
        """Make sure that the group is not shut down, and of this process.

        Raises:
            WorkerGroupClosedError: It is, or is being; or this process was forked from the group's.
        """
        if self._is_forked:
            raise WorkerGroupClosedError(
                f"worker group {self._name!r} is of the process that this one was forked from"
            )
        if self._state in ("closing", "closed"):
            raise WorkerGroupClosedError(f"worker group {self._name!r} was shut down")

    def check_owner(self, what: str) -> None:
        """Make sure that this is the process that made the group.

        Args:
            what: The method that is for it alone.

        Raises:
            WorkerGroupError: It is not.
        """

    def pause(self, seconds: float) -> None:
        """Wait for some time.

        Raises:
            WorkerGroupClosedError: The group is shut down meanwhile.
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not self._ends.wait(min(left, SLICE_S)):
            Session.check_wanted()
        self.check()

    def restart(
        self,
        work: Callable[[], list[int]],
        name: str = "restart_failed_workers",
        *,
        apart: bool = False,
        shared: bool = True,
    ) -> list[int]:
        """Do a restart; where another thread does the same, wait for it and give its outcome.

        Args:
            work: Does it.
            name: What is done, as it is called.
            apart: Whether a thread of its own does it, so that it goes on where this one gives up waiting. It
                takes the outcome of another such restart alone.
            shared: Whether another thread that does the same does it for this one, too; else it comes later.

        Raises:
            WorkerGroupClosedError: The group is shut down.
            WorkerGroupError: The other thread was interrupted, or the restart itself asks.
        """
        self.check()  # first: what a forked process finds going on never ends there
        own, is_handed_over = _Running(Future(), name, apart), False
        try:
            while (running := self._begin(own)) is not None:
                self._refuse_own("restarted")
                is_done(running.outcome)
                is_told = shared and running.name == name and (running.apart or not apart)
                if is_told and not running.outcome.cancelled():
                    return list(running.outcome.result())
            if apart:
                self._run_apart(work, own.outcome)
                is_handed_over = True
                is_done(own.outcome)
            else:
                self._run(work, own.outcome)
            return own.outcome.result()
        finally:
            if not is_handed_over:
                self._drop(own)

    def _drop(self, own: _Running) -> None:
        """Leave nobody waiting for a restart that was interrupted between two of its steps."""
        with self._lock:  # its own thread may begin at this moment
            if is_given_up := own.outcome.cancel():
                own.outcome.set_running_or_notify_cancel()
        if is_given_up and self._restart is own:
            self._restarted()

    def _begin(self, own: _Running) -> _Running | None:
        """Begin a restart, unless one runs: that is given then."""
        with self._lock:
            self.check()
            if self._restart is not None and not self._restart.outcome.cancelled():
                return self._restart
            self._restart = own
            self._restarter, self._state = threading.get_ident(), "restarting"
        return None

    def _run_apart(self, work: Callable[[], list[int]], outcome: "Future[list[int]]") -> None:
        try:
            threading.Thread(
                target=self._run_there, args=(work, outcome), name="raycrew-restart", daemon=True
            ).start()
        except RuntimeError:  # this process can have no more threads
            self._run(work, outcome)

    def _run_there(self, work: Callable[[], list[int]], outcome: "Future[list[int]]") -> None:
        with self._lock:
            is_wanted = not outcome.cancelled() and outcome.set_running_or_notify_cancel()
        if is_wanted:  # else who began it was interrupted
            self._run(work, outcome)

    def _run(self, work: Callable[[], list[int]], outcome: "Future[list[int]]") -> None:
        self._restarter = threading.get_ident()
        interrupted = WorkerGroupError(f"the restart of {self._name!r} was interrupted")
        tell: Callable[[], None] = partial(outcome.set_exception, interrupted)
        try:
            tell = partial(outcome.set_result, work())
        except Exception as error:  # noqa: BLE001 - raised to all who wait
            tell = partial(outcome.set_exception, error)
        finally:
            self._restarted()
            tell()  # only now, so that nobody who hears of it finds it still going on

    def _restarted(self) -> None:
        with self._lock:
            self._restart = None
            self._replace(())
            if self._state == "restarting":
                self._state = "open"

    def _replace(self, ranks: Collection[int]) -> None:
        self._replaced, before = frozenset(ranks), self._others
        self._others = Future()
        before.set_result(None)

    def replacing(self, ranks: Collection[int]) -> None:
        """From now on calls on these ranks wait until the restart is over, or others are named instead.

        Who was sending some has done so.

        Raises:
            WorkerGroupClosedError: The group was shut down meanwhile.
        """
        with self._lock:
            self._replace(ranks)
            before = WeakSet(self._senders)
        deadline = time.monotonic() + UNWIND_S
        while time.monotonic() < deadline:
            with self._lock:
                if before.isdisjoint(self._senders):
                    return
            self.pause(_LOOK_S)
        logger.warning("%s: its restart goes on while calls are still being sent", self._name)

    @contextmanager
    def sending(self, ranks: Collection[int], timeout_s: float | None) -> Iterator[None]:
        """Within, calls on some ranks are sent; first it is waited until none of those is being replaced.

        Raises:
            ResultTimeoutError: One still is, or is again, after `timeout_s`.
            WorkerGroupClosedError: The group was shut down meanwhile.
            WorkerGroupError: The restart itself asks.
        """
        sender, deadline = _Sender(), None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not self._may_send(sender, ranks):
                self.await_replaced(ranks, timeout_s, deadline)
            yield
        finally:
            self._has_sent(sender)

    def _may_send(self, sender: _Sender, ranks: Collection[int]) -> bool:
        with self._lock:
            if self._restart is not None and not self._replaced.isdisjoint(ranks):
                return False
            self._senders.add(sender)
        return True

    def _has_sent(self, sender: _Sender) -> None:
        with self._lock:
            self._senders.discard(sender)

    @contextmanager
    def copying(self, ranks: Collection[int], timeout_s: float) -> Iterator[None]:
        """Within, what is known of some ranks is copied; none is being replaced, unless by who asks.

        Raises:
            ResultTimeoutError: One still is after `timeout_s`.
        """
        if self._restart is not None and self._restarter == threading.get_ident():
            yield
            return
        sender, deadline = _Sender(), time.monotonic() + timeout_s
        try:
            while not self._may_send(sender, ranks):
                with suppress(WorkerGroupClosedError):
                    self.await_replaced(ranks, max(0.0, deadline - time.monotonic()))
            yield
        finally:
            self._has_sent(sender)

    def await_replaced(
        self, ranks: Collection[int], timeout_s: float | None, deadline: float | None = None
    ) -> None:
        """Wait until none of some ranks is being replaced.

        Args:
            ranks: Which.
            timeout_s: How long; None for no limit.
            deadline: When that is over, where it began before.

        Raises:
            ResultTimeoutError: One still is after `timeout_s`.
            WorkerGroupClosedError: The group was shut down meanwhile.
            WorkerGroupError: The restart itself asks.
        """
        running = self._restart
        if running is None or self._replaced.isdisjoint(ranks):
            return
        self._refuse_own("called")
        replaced = sorted(self._replaced.intersection(ranks))
        warn_in_loop(f"a call on ranks {replaced} of {self._name!r} waits for their restart")
        if timeout_s is not None and deadline is None:
            deadline = time.monotonic() + timeout_s
        while True:
            others = self._others
            if self._restart is not running or self._replaced.isdisjoint(ranks):
                break
            if not is_done(others, None if deadline is None else max(0.0, deadline - time.monotonic())):
                said = f"{self._name}: ranks {replaced} are still being restarted after {timeout_s:g} s"
                raise ResultTimeoutError(f"{said}; nothing was sent", replaced)
        self.check()

    def close(self, work: Callable[[], bool], left: Callable[[], bool] | None = None) -> bool:
        """End the group once; a restart gives up first, and who comes later waits and gets the same outcome.

        Args:
            work: Ends it.
            left: Whether it did not end all, so that it is done again for who comes later.

        Returns:
            What `work` returned; False when it has raised before, or `work` itself asks, or a forked process.
        """

        def end() -> bool:
            if (restart := self._restart) is not None and self._restarter != threading.get_ident():
                wait([restart.outcome], UNWIND_S)
            return work()

        return False if self._is_forked else self._end.do(end, left)

    def _closing(self) -> None:
        self._state = "closing"
        self._ends.set()

    def _closed(self) -> None:
        self._state = "closed"

    def _refuse_own(self, what: str) -> None:
        if self._restarter == threading.get_ident():
            raise WorkerGroupError(f"{self._name!r} can't be {what} by what its own restart calls")
