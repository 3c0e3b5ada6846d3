"""The actor that has a directory's record, and who asks it."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any, Literal

from raycrew.tensor_transport import _ray
from raycrew.tensor_transport.errors import (
    DirectoryLostError,
    ShardLostError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
)
from raycrew.tensor_transport.weights._directory.local_socket import (
    Address,
    ElsewhereError,
    LocalClient,
    LocalServer,
    is_awaited,
)
from raycrew.tensor_transport.weights._directory.record import Record

ANSWER_S = 60.0
_TELL_S = 1.0
"""So long a directory that stands still keeps who tells it something: it reads that when it goes on."""

Fanout = int | Literal["auto"] | None

Said = tuple[str, tuple[Any, ...]]
"""A method of the record, and its arguments."""


class DirectoryActor:
    """A record in an actor; waiting calls share its one thread."""

    def __init__(self, keep: int, lease_s: float, fanout: Fanout) -> None:
        self._record = Record(keep, lease_s, fanout)
        self._changed = asyncio.Event()
        self._server = LocalServer(lambda kind, args: getattr(self, kind)(*args))

    async def address(self) -> Address | None:
        return await self._server.start()

    async def parked(self, token: str) -> Any:
        return self._server.take_parked(token)

    async def ask(self, method: str, args: tuple[Any, ...]) -> Any:
        try:
            return getattr(self._record, method)(time.monotonic(), *args)
        finally:
            self._tell()

    async def tell(self, method: str, args: tuple[Any, ...]) -> None:
        with contextlib.suppress(TransportError):
            await self.ask(method, args)

    async def poll(self, method: str, args: tuple[Any, ...], wait_s: float, said: Said | None = None) -> Any:
        deadline = time.monotonic() + wait_s
        if said is not None:
            await self.ask(*said)
        found = await self.ask(method, args)  # What it changed concerns others, whatever it answers.
        while found is None and (now := time.monotonic()) < deadline:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), seconds_left(now, deadline, self._record))
            if not is_awaited.get()():  # Nothing begins for who is gone, and no publisher waits for it.
                break
            found = getattr(self._record, method)(time.monotonic(), *args)
            if found is not None:
                self._tell()
        return found

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class ActorEdge:
    """Asks the actor, over the connection to Ray that its handle was had over; can be pickled.

    On its machine it is asked over a socket, unless what is said has a part that only Ray hands on.
    """

    def __init__(self, actor: Any, address: Address | None = None) -> None:
        self._actor, self._session = actor, _ray.current_session()
        self._address = address
        self._near: LocalClient | None = None
        self._is_found = False

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorEdge, (self._actor, self._address)

    def ask(self, method: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        with _lost_if_silent():
            return self._get("ask", (method, args), timeout_s)

    def tell(self, method: str, args: tuple[Any, ...]) -> None:
        with _lost_if_silent():
            if self._find() is None:
                _ray.send(self._session, self._actor.tell, method, args)
            else:
                with contextlib.suppress(TransportTimeoutError):
                    self._get("tell", (method, args), _TELL_S)

    def poll(self, method: str, args: tuple[Any, ...], wait_s: float, said: Said | None = None) -> Any:
        with _lost_if_silent():
            return self._get("poll", (method, args, wait_s, said), wait_s + ANSWER_S)

    def close(self) -> None:
        _ray.end_actors(self._session, self._actor)
        if self._near is not None:
            self._near.close()

    def _get(self, kind: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        try:
            if (near := self._find()) is not None:
                self._session.check()
                return near.ask(kind, args, timeout_s, self._session.check)
        except ElsewhereError as error:
            self._near = None
            if error.token:
                kind, args = "parked", (error.token,)
        except ConnectionError:
            self._session.check()  # With which the actor ends: that says more.
            raise
        return self._call(kind, args, timeout_s)

    def _call(self, kind: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        return _ray.call_actor(self._session, getattr(self._actor, kind), args, timeout_s)

    def _find(self) -> LocalClient | None:
        """Whom to ask over a socket; None where that can't be."""
        if not self._is_found:
            self._address = self._address or self._call("address", (), ANSWER_S)
            self._near = None if self._address is None else LocalClient(self._address)
            self._is_found = True
        return self._near


@contextlib.contextmanager
def _lost_if_silent() -> Iterator[None]:
    try:
        yield
    except (ConnectionError, ShardLostError, TransportClosedError, TransportTimeoutError) as error:
        raise DirectoryLostError(f"the directory of versions does not answer: {error}") from error


def seconds_left(now: float, deadline: float, record: Record) -> float:
    """How long to wait, at least a moment: what expires now is seen a moment later.

    Whoever waits is not silent: it asks again well before its own lease ends.
    """
    expiry = record.next_expiry()
    left = (deadline if expiry is None else min(deadline, expiry)) - now
    return max(0.001, min(left, record.lease_s / 3))
