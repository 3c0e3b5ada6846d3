"""The way of a request: to a server, to another one if that is right, and the answer or the truth back."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import h11

from raycrew.worker_groups.services._asgi import Receive, Send
from raycrew.worker_groups.services._endpoint import Endpoint
from raycrew.worker_groups.services._forwarding.choosing import Choosing
from raycrew.worker_groups.services._forwarding.exchange import Exchange, PerhapsRunError, SurelyNotRunError
from raycrew.worker_groups.services._forwarding.headers import (
    content_length,
    says_not_run,
    to_client,
    to_server,
)
from raycrew.worker_groups.services._forwarding.incoming import ClientGoneError, Incoming, RefusedError
from raycrew.worker_groups.services._forwarding.keys import Key
from raycrew.worker_groups.services._forwarding.limits import NOT_RUN, PERHAPS_RUN, Limits
from raycrew.worker_groups.services._forwarding.telling import tell
from raycrew.worker_groups.services.errors import ServiceClosedError

logger = logging.getLogger(__name__)

_LOOK_S = 0.05


class _Attempts:
    """What became of a request so far."""

    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        self.may_have_run = self.is_answered = False

    @property
    def outcome(self) -> str:
        begun = self.may_have_run or (self.exchange is not None and self.exchange.has_begun)
        return PERHAPS_RUN if begun else NOT_RUN


class _Search:
    """The search for a server that takes a request: each is asked, and again until the patience is over."""

    def __init__(self, patience_s: float) -> None:
        self._until = time.monotonic() + patience_s
        self.refused: set[str] = set()

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until


class Forwarder:
    """An ASGI application that passes requests on.

    Args:
        choosing: Chooses servers.
        limits: What it bears.
        key: What tells whose a request is.
        is_guarded: Whether clients have authorised themselves to it, rather than to the servers.
    """

    def __init__(self, choosing: Choosing, limits: Limits, key: Key | None, is_guarded: bool) -> None:
        self._choosing, self._limits, self._key, self._is_guarded = choosing, limits, key, is_guarded

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        attempts = _Attempts()
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                incoming = Incoming(scope, receive, self._limits.body_bytes)
                await incoming.hold(self._limits.held_bytes)
                await self._unless_gone(incoming, attempts, send)
        except RefusedError as refused:
            await self._refuse(send, attempts, refused.status, str(refused))
        except TimeoutError:
            await self._refuse(send, attempts, 504, f"no answer within {self._limits.timeout_s:g} s")
        except ClientGoneError:
            return
        except Exception as error:
            if attempts.is_answered:
                raise  # whoever serves this ends the connection
            logger.exception("a request can't be passed on")
            await self._refuse(send, attempts, 500, f"it can't be passed on: {type(error).__name__}")

    async def _unless_gone(self, incoming: Incoming, attempts: _Attempts, send: Send) -> None:
        """Pass a request on for as long as its client is there."""
        work = asyncio.create_task(self._passed_on(incoming, attempts, send))
        gone = asyncio.create_task(incoming.gone())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _passed_on(self, incoming: Incoming, attempts: _Attempts, send: Send) -> None:
        key, resends, search = self._key_of(incoming), 0, _Search(self._limits.patience_s)
        while True:
            endpoint = await self._server(key, search)
            try:
                with self._choosing.counted(endpoint):
                    return await self._attempt(endpoint, incoming, attempts, send)
            except SurelyNotRunError as error:
                self._note(endpoint, incoming, error)
                search.refused.add(endpoint.url)
            except PerhapsRunError as error:
                attempts.may_have_run = True
                self._note(endpoint, incoming, error)
                if attempts.is_answered:
                    return None  # its connection is closed, which tells that the answer is not whole
                if not incoming.may_go_again or resends >= self._limits.resends:
                    raise RefusedError(502, f"replica {endpoint.rank} was lost: {error}") from error
                resends, search = resends + 1, _Search(self._limits.patience_s)

    def _key_of(self, incoming: Incoming) -> str | None:
        if self._key is None:
            return None
        if self._key.is_in_body and not incoming.is_whole:
            most = self._limits.held_bytes
            raise RefusedError(413, f"keys are looked for in bodies of {most} bytes at most")
        return self._key.of(incoming.headers, incoming.held)

    async def _server(self, key: str | None, search: "_Search") -> Endpoint:
        while True:
            endpoint = self._chosen(key)
            if endpoint is not None and not (search.is_over and endpoint.url in search.refused):
                return endpoint
            if search.is_over:
                raise RefusedError(503, f"no replica is ready, for {self._limits.patience_s:g} s")
            await asyncio.sleep(_LOOK_S)

    def _chosen(self, key: str | None) -> Endpoint | None:
        try:
            return self._choosing.choose(key)
        except ServiceClosedError as error:
            raise RefusedError(503, str(error)) from error

    def _note(self, endpoint: Endpoint, incoming: Incoming, error: Exception) -> None:
        self._choosing.note_down(endpoint)
        logger.info("%s for replica %d: %s", incoming.method, endpoint.rank, error)

    async def _attempt(self, endpoint: Endpoint, incoming: Incoming, attempts: _Attempts, send: Send) -> None:
        exchange = attempts.exchange = Exchange()
        try:
            request = self._request(endpoint, incoming)
            head = await exchange.begin(endpoint.host, endpoint.port, request, incoming.body())
            if incoming.is_whole and says_not_run(head.status_code, list(head.headers)):
                exchange.has_begun = False
                raise SurelyNotRunError("it has turned the request away")
            headers = to_client(list(head.headers), _host_of(endpoint))
            pieces, length = exchange.pieces(), content_length(headers)
            if incoming.method != "HEAD" and length is not None and length <= self._limits.held_bytes:
                pieces = _at_once(b"".join([piece async for piece in pieces]))
            attempts.is_answered = True
            headers.append((b"x-raycrew-replica", b"%d" % endpoint.rank))
            await send({"type": "http.response.start", "status": head.status_code, "headers": headers})
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            exchange.close()

    def _request(self, endpoint: Endpoint, incoming: Incoming) -> h11.Request:
        headers = to_server(
            incoming.headers,
            _host_of(endpoint),
            endpoint.headers,
            incoming.length,
            is_authorized_here=self._is_guarded,
        )
        return h11.Request(method=incoming.method, target=incoming.target, headers=headers)

    @staticmethod
    async def _refuse(send: Send, attempts: _Attempts, status: int, message: str) -> None:
        """Say why there is no answer, and whether the request may have run; its rest is not read."""
        if attempts.is_answered:
            return
        await tell(send, status, message, attempts.outcome)


def _host_of(endpoint: Endpoint) -> str:
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"{host}:{endpoint.port}"


async def _at_once(body: bytes) -> AsyncIterator[bytes]:
    if body:
        yield body
