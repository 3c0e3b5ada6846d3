"""The way of a request that is a call of a method, on one worker of a group, and its result back."""

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, MutableMapping
from typing import Any

from ray.exceptions import RayError, RayTaskError

from raycrew.worker_groups._calls import MultiWorkerFuture, deadline_after, described, has_died, left
from raycrew.worker_groups.balancing import LoadBalancer
from raycrew.worker_groups.errors import (
    ResultTimeoutError,
    UnknownMethodError,
    WorkerFailureError,
    WorkerGroupClosedError,
    WorkerGroupError,
)
from raycrew.worker_groups.services._asgi import Receive, Send, answer
from raycrew.worker_groups.services._forwarding.headers import is_idempotent
from raycrew.worker_groups.services._forwarding.incoming import ClientGoneError, Incoming, RefusedError
from raycrew.worker_groups.services._forwarding.keys import Key
from raycrew.worker_groups.services._forwarding.limits import HAS_RUN, NOT_RUN, PERHAPS_RUN, Limits
from raycrew.worker_groups.services._forwarding.telling import tell

logger = logging.getLogger(__name__)

#: Names that are a balancer's own.
_RESERVED = frozenset({"key", "timeout", "method"})


class CallError(Exception):
    """A call that has no result.

    Attributes:
        status: What its request is answered with.
        outcome: Whether it has run.
    """

    def __init__(self, status: int, message: str, outcome: str = NOT_RUN) -> None:
        super().__init__(message)
        self.status, self.outcome = status, outcome


class Caller:
    """An ASGI application that calls methods of workers, each call on one of them.

    Args:
        balancer: Chooses the worker.
        methods: What may be called.
        limits: What it bears.
        key: What tells whose a request is.
        check: Raises a `WorkerGroupError` where nothing can be sent, as the group has ended.
    """

    def __init__(
        self,
        balancer: LoadBalancer,
        methods: Collection[str],
        limits: Limits,
        key: Key | None,
        check: Callable[[], object],
    ) -> None:
        self._check = check
        self._balancer, self._methods, self._limits, self._key = balancer, tuple(methods), limits, key

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            await answer(
                send, 200, await self._result(Incoming(scope, receive, self._limits.body_bytes), scope)
            )
        except ClientGoneError:
            return
        except RefusedError as refused:
            await tell(send, refused.status, str(refused), NOT_RUN)
        except CallError as failed:
            await tell(send, failed.status, str(failed), failed.outcome)
        except (TypeError, ValueError, RecursionError) as error:
            await tell(send, 500, f"the result is no JSON: {error}", HAS_RUN)
        except Exception as error:
            logger.exception("a call over HTTP has failed")
            await tell(send, 500, f"the call has failed: {type(error).__name__}", PERHAPS_RUN)

    async def _result(self, incoming: Incoming, scope: Mapping[str, Any]) -> Any:
        method = scope["path"].removeprefix("/")
        if method not in self._methods:
            raise CallError(404, f"there is no {method!r} to be called; there are {', '.join(self._methods)}")
        if incoming.method != "POST":
            raise CallError(405, "methods are called by POST")
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                await incoming.hold(self._limits.body_bytes)
        except TimeoutError:
            raise CallError(408, f"the request took more than {self._limits.timeout_s:g} s") from None
        return await self._unless_gone(incoming, method, arguments_of(incoming.held))

    async def _unless_gone(self, incoming: Incoming, method: str, arguments: Mapping[str, Any]) -> Any:
        """The result of a call, which is cancelled should its client go away."""
        work = asyncio.create_task(self._called(incoming, method, arguments))
        gone = asyncio.create_task(incoming.gone())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGoneError("the client has closed its connection")
            return await work
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _called(self, incoming: Incoming, method: str, arguments: Mapping[str, Any]) -> Any:
        key = None if self._key is None else self._key.of(incoming.headers, incoming.held)
        resends = self._limits.resends if is_idempotent(incoming.method, incoming.headers) else 0
        deadline, may_have_run = deadline_after(self._limits.timeout_s), False
        while True:
            try:
                future = await _or_cancelled(
                    asyncio.to_thread(self._sent, method, arguments, key, left(deadline))
                )
            except CallError as error:
                error.outcome = PERHAPS_RUN if may_have_run else error.outcome
                raise
            try:
                return (await future)[0]
            except WorkerFailureError as error:
                if not resends or not has_died(error):
                    raise _told(error) from error
                resends, may_have_run = resends - 1, True
            except ResultTimeoutError as error:
                future.cancel()
                raise CallError(504, f"no result within {self._limits.timeout_s:g} s", PERHAPS_RUN) from error
            except WorkerGroupError as error:
                raise CallError(502, str(error), PERHAPS_RUN) from error

    def _sent(
        self, method: str, arguments: Mapping[str, Any], key: str | None, timeout_s: float | None
    ) -> MultiWorkerFuture[Any]:
        """Send a call.

        Raises:
            CallError: It could not be sent.
        """
        try:
            self._check()
        except WorkerGroupError as error:
            raise CallError(503, str(error)) from error
        try:
            future = self._balancer.call(method, key=key, timeout=timeout_s, **arguments)
        except UnknownMethodError as error:
            raise CallError(404, str(error)) from error
        except (TypeError, ValueError) as error:
            raise CallError(400, str(error)) from error
        except WorkerGroupClosedError as error:  # it was open just before: perhaps as it was being sent
            raise CallError(503, str(error), PERHAPS_RUN) from error
        except WorkerGroupError as error:
            raise CallError(503, str(error)) from error
        if future.is_stream:
            future.cancel()
            raise CallError(501, f"{method} gives a stream, which can't be had here", PERHAPS_RUN)
        return future


async def _or_cancelled(sending: Coroutine[Any, Any, MultiWorkerFuture[Any]]) -> MultiWorkerFuture[Any]:
    """A call that is being sent; it is cancelled once it has been, if nobody waits for it any more."""
    sent = asyncio.create_task(sending)
    try:
        return await asyncio.shield(sent)
    except asyncio.CancelledError:
        sent.add_done_callback(_cancel)
        raise


def _cancel(sent: "asyncio.Task[MultiWorkerFuture[Any]]") -> None:
    if not sent.cancelled() and sent.exception() is None:
        asyncio.get_running_loop().run_in_executor(None, sent.result().cancel)


def _told(error: WorkerFailureError) -> CallError:
    if has_died(error):
        return CallError(502, f"worker {error.rank} was lost", PERHAPS_RUN)
    cause = error.cause
    if cause is None or (isinstance(cause, RayError) and not isinstance(cause, RayTaskError)):
        return CallError(500, error.message, PERHAPS_RUN)
    return CallError(500, described(cause), HAS_RUN)


def arguments_of(body: bytes) -> dict[str, Any]:
    """The keyword arguments that a body of JSON has.

    Raises:
        CallError: It has none.
    """
    try:
        value = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise CallError(400, f"arguments are a JSON object by name: {error}") from error
    if not isinstance(value, dict):
        raise CallError(400, "arguments are a JSON object by name")
    if reserved := _RESERVED & value.keys():
        raise CallError(400, f"no argument can be called {', '.join(sorted(reserved))} here")
    return value
