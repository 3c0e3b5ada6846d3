"""Workers that are objects of this process, each with a thread of its own."""

import asyncio
import inspect
import itertools
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from raycrew.cluster_core import Claim
from raycrew.worker_groups._calls import MultiWorkerFuture
from raycrew.worker_groups._health import Ended, Findings, Seen, Wanted, observed
from raycrew.worker_groups._worker import CurrentWorker, Heart, Running, as_text, be_current, tick
from raycrew.worker_groups.protocols import ArgumentTransport

T = TypeVar("T")

logger = logging.getLogger(__name__)

_numbers = itertools.count(1)


def nothing() -> None:
    """What a worker that has time can do at once."""


class WorkerThread:
    """One worker with its thread."""

    def __init__(self, current: CurrentWorker, transport: ArgumentTransport | None) -> None:
        self.instance: Any = None
        self.busy = False
        self._thread_id = 0
        self.page = memoryview(bytearray(4096))
        self._heart = Heart(self.page)
        self._transport, self._current = transport, current
        self.thread = ThreadPoolExecutor(1, f"{current.group_name}-{current.rank}", be_current, (current,))

    def start(self, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[float]:
        """Construct the worker; gives the seconds that took."""
        sent = self._sent(args, kwargs)

        def construct() -> float:
            begin = time.perf_counter()
            self.instance = self._call(cls, *sent)
            return time.perf_counter() - begin

        return self._submit("__init__", b"", construct)

    def found(self, seen: Seen | str, wanted: Wanted) -> Findings:
        """What a diagnosis tells of it."""
        known = Findings.nothing(seen) if isinstance(seen, str) else Findings(seen)
        frame = sys._current_frames().get(self._thread_id) if wanted.stacks else None  # noqa: SLF001 - Python's own
        stacks = "" if frame is None else "".join(traceback.format_stack(frame))
        missing = {**known.missing, "output": "it is this process's own"}
        return replace(known, stacks=stacks, told_by="Python" if stacks else "", missing=missing)

    def send(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
        """Call a method when it is its turn."""
        call = f"{id(self)}-{next(_numbers)}".encode()
        run = getattr(self.instance, name)
        future = self._submit(name, call, self._run, run, *self._sent(args, kwargs))
        future.call_id = call  # type: ignore[attr-defined] # as `call_id` tells of calls on Ray
        return future

    def _submit(self, name: str, call: bytes, fn: Callable[..., T], *args: Any) -> Future[T]:
        return self.thread.submit(self._noted, name, call, fn, *args)

    def _noted(self, name: str, call: bytes, fn: Callable[..., T], *args: Any) -> T:
        self.busy, began, self._thread_id = True, time.monotonic(), threading.get_ident()
        try:
            with Running(as_text(name), self._heart):
                return fn(*args)
        finally:
            self.busy = False
            if call and (observer := observed.by) is not None:
                who = self._current.group_name, self._current.rank
                observer.ran(call, *who, name, began, time.monotonic(), 0.0)

    def _run(self, method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = self._call(method, args, kwargs)
        if inspect.iscoroutine(result):
            return self._out(asyncio.run(result))
        if inspect.isasyncgen(result):
            return list(map(self._out, asyncio.run(_listed(result))))
        return list(map(self._out, _ticking(result))) if inspect.isgenerator(result) else self._out(result)

    def _call(self, method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return method(*map(self._in, args), **{name: self._in(value) for name, value in kwargs.items()})

    def _sent(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        return [self._pack(arg) for arg in args], {name: self._pack(value) for name, value in kwargs.items()}

    def _pack(self, value: Any) -> Any:
        return value if isinstance(value, MultiWorkerFuture | Future) else self._out(value)

    def _out(self, value: Any) -> Any:
        return value if self._transport is None else self._transport.encode(value)

    def _in(self, value: Any) -> Any:
        if isinstance(value, MultiWorkerFuture):
            given = value._as_argument()  # noqa: SLF001 - as for workers on Ray
            values = [self._in(call) for call in given.refs]
            return values if given.join is None else given.join(values)
        if isinstance(value, Future):
            value = value.result()
        return value if self._transport is None else self._transport.decode(value)


@dataclass
class Threads:
    """The workers of a group in this process, without the group."""

    name: str
    claim: Claim
    workers: list[WorkerThread] = field(default_factory=list)
    ended: bool = False

    def say(self, method: str) -> None:
        """Have all call a method before they end; what it raises is logged."""
        for worker in self.workers:
            worker.send(method, [], {}).add_done_callback(self._log)

    def _log(self, call: Future[Any]) -> None:
        if not call.cancelled() and (error := call.exception()) is not None:
            logger.warning("%s: the clean-up of removed ranks: %s", self.name, error)

    def end(self, timeout_s: float, force: bool) -> Ended:
        """A thread can't be killed: what still runs after its time goes on, and is not waited for."""
        if not force and not self.ended:
            with suppress(RuntimeError):  # at the end of the interpreter threads take nothing any more
                wait([worker.thread.submit(nothing) for worker in self.workers], timeout_s)
        self.ended = True
        for worker in self.workers:
            worker.thread.shutdown(wait=False, cancel_futures=True)
        busy = [rank for rank, worker in enumerate(self.workers) if worker.busy]
        return Ended(tuple(busy), dict.fromkeys(busy, "a thread can't be killed, and it still runs a call"))


@dataclass(frozen=True)
class ThreadHandle:
    """A worker, called past its group: `handle.method.remote(...)` gives a future of the result."""

    worker: WorkerThread

    def __getattr__(self, name: str) -> Any:
        return _Method(self.worker, name)


@dataclass(frozen=True)
class _Method:
    worker: WorkerThread
    name: str

    def remote(self, *args: Any, **kwargs: Any) -> Future[Any]:
        return self.worker.send(self.name, args, kwargs)


async def _listed(items: Any) -> list[Any]:
    listed = []
    async for item in items:
        tick()
        listed.append(item)
    return listed


def _ticking(items: Iterable[T]) -> Iterator[T]:
    for item in items:
        tick()
        yield item
