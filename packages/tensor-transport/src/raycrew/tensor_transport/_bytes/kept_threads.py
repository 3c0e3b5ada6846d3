"""Threads that stay for a moment after their work: to start one takes as long as a copy of megabytes."""

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


def run_beside(work: Callable[[], _T]) -> Future[_T]:
    """What another thread makes of some work, on the processors of this one: soon or late.

    Whoever can do without cancels it first. The interpreter's end waits for none.

    Raises:
        RuntimeError: There are no more threads to be had.
    """
    mine = processors()
    try:
        thread = _idle[mine].pop()
    except IndexError:
        thread = _Kept(mine)
        thread.start()
    future: Future[_T] = Future()
    thread.todo.put((future, work))
    return future


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
        self.todo: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._processors = processors

    def run(self) -> None:
        """Do one thing after another."""
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        try:
            todo = self.todo.get(timeout=_KEPT_S)
        except Empty:
            try:
                _idle[self._processors].remove(self)
            except ValueError:  # Somebody took it at this moment, and may wait for what comes.
                todo = self.todo.get()
            else:
                return False
        self._do(*todo)
        return True

    def _do(self, future: Future[Any], work: Callable[[], Any]) -> None:
        begun, made, error = future.set_running_or_notify_cancel(), None, None
        try:
            if begun:
                made = work()
        except BaseException as raised:  # noqa: BLE001 - whoever waits gets it
            error = raised
        _idle[self._processors].append(self)  # First: whoever waits may have more to do.
        if error is not None:
            future.set_exception(error)
        elif begun:
            future.set_result(made)


_numbers = itertools.count()
_idle: defaultdict[Processors, list[_Kept]] = defaultdict(list)
os.register_at_fork(after_in_child=_idle.clear)
