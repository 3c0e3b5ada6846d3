"""A queue in an actor of its own, and the way there from any process of the cluster."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycrew.cluster_core import ClusterClosedError
from raycrew.worker_groups._health.timeline import RayMetrics
from raycrew.worker_groups._ray import (
    current_session,
    end_actors,
    is_behind_proxy,
    is_death,
    may_come_back,
    own_node,
    start_actor,
)
from raycrew.worker_groups.errors import (
    SampleQueueClosedError,
    SampleQueueError,
    SampleQueueTimeoutError,
    WorkerGroupError,
)
from raycrew.worker_groups.rollouts.samples._asking import Request
from raycrew.worker_groups.rollouts.samples._channels.local import LocalChannel, deadline_in
from raycrew.worker_groups.rollouts.samples._keeping import Keeper
from raycrew.worker_groups.rollouts.samples._options import QueueOptions
from raycrew.worker_groups.rollouts.samples._telling import Teller

logger = logging.getLogger(__name__)

#: How long a request waits in the actor before its sender is told that it is not possible yet.
POLL_S = 5.0
#: How long an answer may take beyond that.
ANSWER_S = 30.0
_WAITERS = 1000
#: Who waits for samples must not keep those out who bring some, nor the other way round.
_GROUPS = {"get": _WAITERS, "put": _WAITERS}


class Answer(NamedTuple):
    """What became of a request.

    Attributes:
        value: What it gave.
        error: What it raised, in place of that.
        is_late: Whether it may become possible later, and `error` says why it is not.
    """

    value: Any = None
    error: Exception | None = None
    is_late: bool = False


class QueueActor:
    """The actor itself."""

    def __init__(self, options: QueueOptions) -> None:
        self._options = options

    async def open(self) -> Answer:
        """Begin; before anything else."""
        tell = Teller(self._options.name, RayMetrics().count)
        try:
            self._channel = LocalChannel(Keeper(self._options, time.monotonic, tell))
        except (WorkerGroupError, OSError) as error:
            return Answer(error=error)
        return Answer()

    @ray.method(concurrency_group="get")
    async def get(self, request: Request, wait_s: float) -> Answer:
        """Hand samples out."""
        return await self.ask(request, wait_s)

    @ray.method(concurrency_group="put")
    async def put(self, request: Request, wait_s: float) -> Answer:
        """Take new samples."""
        return await self.ask(request, wait_s)

    async def ask(self, request: Request, wait_s: float) -> Answer:
        """Do anything else."""
        try:
            comes_again = wait_s >= POLL_S  # unless its sender is killed, of whom nothing is heard then
            return Answer(await self._channel.ask_async(request, wait_s, comes_again=comes_again))
        except SampleQueueTimeoutError as error:
            return Answer(error=error, is_late=True)
        except (WorkerGroupError, ValueError, TypeError, OSError) as error:
            return Answer(error=error)


class RayChannel:
    """To an actor; one that was passed on can't end it.

    Args:
        name: Of the queue.
        actor: Its handle.
        is_owner: Whether to end it by `close`.
    """

    def __init__(self, name: str, actor: Any, *, is_owner: bool = False) -> None:
        self._name, self._actor, self._is_owner = name, actor, is_owner
        self._session, self._is_closed = current_session(), False

    @classmethod
    def start(cls, options: QueueOptions, timeout_s: float) -> "RayChannel":
        """Have an actor made, beside this process where that can be.

        Raises:
            GetTimeoutError: Ray's control service does not answer.
            SampleQueueTimeoutError: The actor does not answer in time.
            SampleQueueClosedError: It has died.
            SampleJournalError: Its folder can't be used.
        """
        where: dict[str, Any] = {}
        if not is_behind_proxy():
            where["scheduling_strategy"] = NodeAffinitySchedulingStrategy(own_node()[0], soft=True)
        remote: Any = ray.remote
        kind = remote(num_cpus=0, max_restarts=0, concurrency_groups=_GROUPS)(QueueActor)
        actor = start_actor(kind, where, arguments=[options])
        channel = cls(options.name, actor, is_owner=True)
        try:
            _value(channel._take(channel._translated(actor.open.remote), timeout_s))
        except BaseException:
            channel.close()
            raise
        return channel

    def __reduce__(self) -> tuple[Any, ...]:
        return RayChannel, (self._name, self._actor)

    def ask(self, request: Request, timeout_s: float | None) -> Any:
        """See `Channel`."""
        deadline = deadline_in(timeout_s)
        while True:
            wait_s = _wait_s(deadline)
            answer = self._take(self._send(request, wait_s), wait_s + ANSWER_S)
            if _is_final(answer, deadline):
                return _value(answer)

    async def ask_async(self, request: Request, timeout_s: float | None) -> Any:
        """See `Channel`."""
        deadline = deadline_in(timeout_s)
        while True:
            wait_s = _wait_s(deadline)
            answer = await self._take_async(self._send(request, wait_s), wait_s + ANSWER_S)
            if _is_final(answer, deadline):
                return _value(answer)

    def tell(self, request: Request) -> None:
        """See `Channel`."""
        self._send(request, 0.0)

    def close(self) -> None:
        """See `Channel`; ends the actor if this is its owner's."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_owner:
            try:
                end_actors([self._actor])
            except WorkerGroupError as error:  # the connection ends, and the actor with it
                logger.debug("%s: %s", self._name, error)

    def _send(self, request: Request, wait_s: float) -> Any:
        if self._is_closed:
            raise SampleQueueClosedError(f"{self._name} was closed")
        method = request.operation if request.operation in _GROUPS else "ask"
        return self._translated(lambda: getattr(self._actor, method).remote(request, wait_s))

    def _take(self, ref: Any, timeout_s: float) -> Answer:
        answer: Answer = self._translated(lambda: self._session.get(ref, timeout=timeout_s))
        return answer

    async def _take_async(self, ref: Any, timeout_s: float) -> Answer:
        deadline, coming = time.monotonic() + timeout_s, asyncio.wrap_future(ref.future())
        while not coming.done():
            self._translated(lambda: None)
            if (left := deadline - time.monotonic()) <= 0:
                raise self._unanswered(timeout_s)
            await asyncio.wait([coming], timeout=min(left, 1.0))
        answer: Answer = self._translated(coming.result)
        return answer

    def _translated(self, ask: Callable[[], Any]) -> Any:
        """What Ray answers, in this session; its errors in the words of a queue."""
        try:
            with self._session.while_connected():
                return ask()
        except ClusterClosedError as error:
            raise SampleQueueClosedError(f"{self._name}: {error}", may_be_done=True) from error
        except GetTimeoutError as error:
            raise self._unanswered(ANSWER_S) from error
        except ray.exceptions.RayError as error:
            if is_death(error) and not may_come_back(error):
                raise SampleQueueClosedError(
                    f"{self._name} was closed, or its actor has died", may_be_done=True
                ) from error
            raise SampleQueueError(
                f"{self._name} can't be reached; what was asked may have been done", may_be_done=True
            ) from error

    def _unanswered(self, timeout_s: float) -> SampleQueueTimeoutError:
        what = f"the actor of {self._name} did not answer for {timeout_s:g} s"
        return SampleQueueTimeoutError(f"{what}; what was asked may have been done", may_be_done=True)


def _wait_s(deadline: float) -> float:
    return min(POLL_S, max(0.0, deadline - time.monotonic()))


def _is_final(answer: Answer, deadline: float) -> bool:
    return not answer.is_late or time.monotonic() >= deadline


def _value(answer: Answer) -> Any:
    if answer.error is not None:
        raise answer.error
    return answer.value
