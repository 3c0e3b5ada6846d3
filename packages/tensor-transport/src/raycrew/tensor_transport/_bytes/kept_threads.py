"""Threads that stay for a moment after their work: to start one takes as long as a copy of megabytes."""

import contextlib
import ctypes
import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

_KEPT_S = 1.0
_T = TypeVar("_T")

Processors = frozenset[int]
"""Which processors a thread may run on; those that it starts may run on the same."""


def processors() -> Processors:
    """Those of this thread."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def apart(count: int) -> list[Processors]:
    """Where so many threads should run that help this one.

    A scheduler may leave two threads on one processor for a long time while another one does nothing. So
    where these and this one are as many as there are processors, each of them has one that is not this
    one's at the moment; where there are more processors, one may be busy with something else.
    """
    mine = processors()
    others = sorted(mine - {_this_processor()})
    return [frozenset({other}) for other in others] if len(others) == count else [mine] * count


def run_beside(work: Callable[[], _T]) -> Future[_T]:
    """What another thread makes of some work, on the processors of this one: soon or late.

    Whoever can do without cancels it first. The interpreter's end waits for none.

    Raises:
        RuntimeError: There are no more threads to be had.
    """
    future: Future[_T] = Future()
    _taken(processors()).todo.put((future, work, True))
    return future


class Crew:
    """Threads that help this one with one thing after another, without a pause between these.

    All that they were given must be over, or cancelled, when it is closed.
    """

    def __init__(self) -> None:
        self._threads: list[_Kept] = []

    def run_beside(self, work: Callable[[], _T], count: int, futures: list[Future[_T]]) -> None:
        """Have so many threads do some work, each after what it was given before, and note what they make.

        There may be fewer to be had. They are noted first: whoever is interrupted has to know of them.
        """
        with contextlib.suppress(RuntimeError):  # There may be no more threads to be had.
            for where in apart(count)[len(self._threads) :]:
                self._threads.append(_taken(where))
        for thread in self._threads[:count]:
            futures.append(Future())
            thread.todo.put((futures[-1], work, False))

    def close(self) -> None:
        """Others may have the threads. Idempotent."""
        while self._threads:
            thread = self._threads.pop()
            _idle[thread.processors].append(thread)


def run_whole(work: Callable[[], object]) -> None:
    """Run something that no Ctrl-C breaks off: that comes in the main thread alone, and is raised then."""
    try:
        beside = run_beside(work) if threading.current_thread() is threading.main_thread() else None
    except RuntimeError:
        beside = None
    if beside is None:
        work()
        return
    try:
        beside.result()
    finally:
        wait([beside])


class _Kept(threading.Thread):
    """Ends when nobody had something for it to do for a while; the interpreter waits for none."""

    def __init__(self, processors: Processors) -> None:
        super().__init__(name=f"copy-{next(_numbers)}", daemon=True)
        self.todo: SimpleQueue[tuple[Future[Any], Callable[[], Any], bool]] = SimpleQueue()
        self.processors = processors

    def run(self) -> None:
        """Do one thing after another."""
        if self.processors != processors():  # Those of whoever started it.
            with contextlib.suppress(OSError):  # They may have been taken away from this process.
                os.sched_setaffinity(0, self.processors)
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        try:
            todo = self.todo.get(timeout=_KEPT_S)
        except Empty:
            try:
                _idle[self.processors].remove(self)
            except ValueError:  # Somebody has taken it, and may wait for what comes.
                return True
            return False
        self._do(*todo)
        return True

    def _do(self, future: Future[Any], work: Callable[[], Any], is_last: bool) -> None:
        begun, made, error = future.set_running_or_notify_cancel(), None, None
        try:
            if begun:
                made = work()
        except BaseException as raised:  # noqa: BLE001 - whoever waits gets it
            error = raised
        if is_last:
            _idle[self.processors].append(self)  # First: whoever waits may have more to do.
        if error is not None:
            future.set_exception(error)
        elif begun:
            future.set_result(made)


def _taken(where: Processors) -> _Kept:
    """A thread on these processors, as long as they are there to be had, that is nobody else's."""
    try:
        return _idle[where].pop()
    except IndexError:
        thread = _Kept(where)
        thread.start()
        return thread


def _this_processor() -> int:
    """The one that this thread is on at this moment; -1 where threads can't be told where to run."""
    return -1 if _sched_getcpu is None or not hasattr(os, "sched_setaffinity") else int(_sched_getcpu())


_sched_getcpu = getattr(ctypes.PyDLL(None), "sched_getcpu", None)
_numbers = itertools.count()
_idle: defaultdict[Processors, list[_Kept]] = defaultdict(list)
os.register_at_fork(after_in_child=_idle.clear)
