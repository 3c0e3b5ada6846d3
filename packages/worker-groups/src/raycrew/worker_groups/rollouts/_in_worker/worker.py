"""What runs rollouts in a worker's process: coroutines beside one another, each with its deadline."""

import asyncio
import importlib
import inspect
import json
import os
import traceback
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from operator import index
from typing import Any

import ray
from ray import cloudpickle

from raycrew.worker_groups.rollouts._in_worker.owners import Owners
from raycrew.worker_groups.rollouts._in_worker.watchdog import Watchdog
from raycrew.worker_groups.rollouts._values import Call, CurrentRollout, Outcome, RolloutSample, Wishes

#: The concurrency group that answers while rollouts block theirs.
WATCH = "watch"

_current: ContextVar[CurrentRollout] = ContextVar("raycrew_rollout")


def current_rollout() -> CurrentRollout:
    """Which rollout the running coroutine is of: its prompt's id, which of the samples, which attempt.

    Raises:
        RuntimeError: It is of none.
    """
    try:
        return _current.get()
    except LookupError:
        raise RuntimeError("this is not called by a rollout of a RolloutPool") from None


def resolved(source: Any) -> Any:
    """What an import path like "package.module:name" names; anything else is itself."""
    if not isinstance(source, str):
        return source
    module, _, name = source.rpartition(":" if ":" in source else ".")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def check_coroutine(rollout: Any) -> None:
    """Make sure that something is called for a coroutine.

    Raises:
        TypeError: It is not.
    """
    if not callable(rollout) or isinstance(rollout, type):
        raise TypeError(f"a rollout is a coroutine function or an import path of one, not {rollout!r}")
    function = getattr(rollout, "func", rollout)  # of a functools.partial
    if not inspect.isroutine(function):
        function = type(function).__call__
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"{rollout!r} is not a coroutine function (async def)")


class RolloutWorker:
    """Of one worker.

    Args:
        code: The coroutine function and what makes its state, or None, pickled as a pair.
    """

    def __init__(self, code: bytes) -> None:
        rollout, state = cloudpickle.loads(code)
        self._rollout: Callable[..., Any] = resolved(rollout)
        check_coroutine(self._rollout)
        self._make: Callable[[], Any] | None = resolved(state)
        self._state = None if self._make is None else (self._make(),)
        self._watchdog = Watchdog(self._has_no_loop)
        self._running: set[asyncio.Task[Outcome]] = set()
        self._owners = Owners(_current)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, call: Call, wishes: Wishes) -> Outcome:
        """Run one rollout within its deadline."""
        with self._watchdog.until(call.end_s):
            return await self._run(call, wishes)

    async def _run(self, call: Call, wishes: Wishes) -> Outcome:
        self._loop = asyncio.get_running_loop()
        self._owners.observe(self._loop)
        task = asyncio.ensure_future(self._outcome(call, wishes))
        self._owners.note(task, call.which)
        self._running.add(task)  # the loop alone does not keep tasks
        task.add_done_callback(self._running.discard)
        try:
            if (await asyncio.wait([task], timeout=call.deadline_s))[0]:
                return _CANCELLED if task.cancelled() else task.result()
            task.cancel()
            is_over = (await asyncio.wait([task], timeout=call.grace_s))[0]
        except asyncio.CancelledError:
            task.cancel()
            watched = self._watchdog.begin(call.grace_s)
            task.add_done_callback(lambda _: self._watchdog.over(watched))
            raise
        if is_over:
            return Outcome(kind="late", message=f"it ran past its deadline of {call.deadline_s:g} s")
        message = f"it ran past its deadline of {call.deadline_s:g} s, and on after it was cancelled"
        return Outcome(kind="stuck", message=message)

    def _has_no_loop(self) -> bool:
        return self._loop is not None and not self._loop.is_running()

    @ray.method(concurrency_group=WATCH)
    async def blocking(self) -> CurrentRollout | None:
        """Which rollout has the event loop now; answered in a loop beside it."""
        return self._owners.running()

    async def _outcome(self, call: Call, wishes: Wishes) -> Outcome:
        process = os.getpid()
        try:
            _current.set(call.which)
            return told(await self._rollout(*self._state_of(call), cloudpickle.loads(call.prompt)), wishes)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return _raised()
        except BaseException:  # noqa: BLE001 - a SystemExit of a rollout would end all of them
            return _raised()
        finally:
            if os.getpid() != process:  # a child that the rollout has forked, which must not answer for it
                os._exit(1)

    def _state_of(self, call: Call) -> tuple[Any, ...]:
        if self._make is None:
            return ()
        return (self._make(),) if call.is_fresh or self._state is None else self._state


def told(value: Any, wishes: Wishes) -> Outcome:
    """What a rollout has returned, as it is sent.

    Raises:
        TypeError: It can't be pickled, or is not what the collection needs.
        ValueError: The same.
    """
    if wishes.columns is not None:
        _check_sample(value, wishes.columns)
    try:
        text = json.dumps(plain(value), allow_nan=False, separators=(",", ":")) if wishes.is_json else ""
    except (TypeError, ValueError) as error:
        raise TypeError(f"the rollout returned what JSON can't hold: {error}") from error
    try:
        data = bytes(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever the value's own methods raise
        raise TypeError(f"the rollout returned what can't be pickled: {error}") from error
    return Outcome(data, text)


def plain(value: Any) -> Any:
    """A sample as JSON can hold it."""
    if not isinstance(value, RolloutSample):
        return value
    check_columns(value.columns)
    length = {} if value.length is None else {"length": value.length}
    return {**value.columns, "version": value.version, **length}


def check_columns(columns: Iterable[str]) -> None:
    """Make sure that columns can stand in a line beside what it says of the sample itself.

    Raises:
        ValueError: They can't.
    """
    if taken := sorted({"version", "length"} & set(columns)):
        raise ValueError(f"in a file, {taken[0]!r} is the sample's own: the column needs another name")


def _check_sample(value: Any, columns: tuple[str, ...]) -> None:
    if not isinstance(value, RolloutSample):
        raise TypeError(f"for a queue a rollout returns a RolloutSample, not {type(value).__name__}")
    if strange := [name for name in value.columns if name not in columns]:
        raise ValueError(f"the queue has no column {strange[0]!r}, but {', '.join(columns)}")
    if not value.columns:
        raise ValueError("the RolloutSample has no column at all")
    _check_number("version", value.version)
    if value.length is not None:
        _check_number("length", value.length)


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"the {name} of a RolloutSample is a whole number, not {value!r}")
    if index(value) < 0:
        raise ValueError(f"the {name} of a RolloutSample is not negative, got {value}")


_CANCELLED = Outcome(
    kind="raised", message="it was cancelled, though it had time: by itself, or by another one"
)


def _raised() -> Outcome:
    return Outcome(kind="raised", message=traceback.format_exc())
