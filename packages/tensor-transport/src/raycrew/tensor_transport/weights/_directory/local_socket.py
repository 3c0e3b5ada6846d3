"""Questions from processes of the same machine, over a Unix socket, in a tenth of an actor call's time.

The socket's name is abstract: no file is left when its process dies. Both sides look at who the other one is.
"""

import asyncio
import contextlib
import os
import pickle
import secrets
import socket
import struct
import sys
import time
import weakref
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from raycrew.tensor_transport import _ray
from raycrew.tensor_transport.errors import TransportError, TransportTimeoutError

_SIZE = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")  # process, user and group, as the kernel knows them
_SLICE_S = 1.0
_PARKED_S = 60.0

is_awaited: ContextVar[Callable[[], bool]] = ContextVar("is_awaited", default=lambda: True)
"""Tells, in what answers, whether whoever asked is still there, as far as is known."""

Answer = Callable[[str, tuple[Any, ...]], Awaitable[Any]]


class Address(NamedTuple):
    """Where a server listens, and which process that is."""

    name: str
    pid: int


class ElsewhereError(Exception):
    """What is asked can't be, or not be answered, over a socket: ask in another way.

    Attributes:
        token: What the answer, which is made already, can be had by; "" where nothing was asked.
    """

    def __init__(self, token: str = "") -> None:
        super().__init__(token)
        self.token = token


class LocalServer:
    """Answers processes of the same user, in the event loop that it was started in.

    Args:
        answer: Called with what is asked, a name and arguments.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._parked: dict[str, Any] = {}
        self._server: asyncio.Server | None = None
        self._address: Address | None = None

    async def start(self) -> Address | None:
        """Listen; None where the system has no such sockets. Idempotent."""
        if self._address is None and sys.platform == "linux":
            with contextlib.suppress(OSError):  # A sandbox, say.
                listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                address = Address(f"raycrew-{secrets.token_hex(16)}", os.getpid())
                listening.bind(f"\0{address.name}")
                listening.listen()
                self._address = address
                self._server = await asyncio.start_unix_server(
                    self._serve, sock=listening, backlog=socket.SOMAXCONN
                )
        return self._address

    def take_parked(self, token: str) -> Any:
        """An answer that could not be given over a socket, once.

        Raises:
            TransportError: Nobody asked for it in time.
        """
        try:
            return self._parked.pop(token)
        except KeyError:
            raise TransportError("an answer was not asked for in time") from None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            if _peer(writer.get_extra_info("socket"))[1] != os.geteuid():
                return
            is_awaited.set(lambda: not reader.at_eof())
            while True:
                (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
                answer = await self._answer_to(await reader.readexactly(size))
                writer.write(_SIZE.pack(len(answer)) + answer)
                await writer.drain()

    async def _answer_to(self, asked: bytes) -> bytes:
        """What was found and what was raised, as bytes."""
        try:
            found = await self._answer(*pickle.loads(asked))
            plain = _ray.dumps_plain((found, None))
        except Exception as error:  # noqa: BLE001 - raised where it was asked
            return _raised(error)
        return _raised(ElsewhereError(self._park(found))) if plain is None else plain

    def _park(self, found: Any) -> str:
        token = secrets.token_hex(16)
        self._parked[token] = found
        asyncio.get_running_loop().call_later(_PARKED_S, self._parked.pop, token, None)
        return token


def _raised(error: Exception) -> bytes:
    with contextlib.suppress(Exception):  # Its own class can't be handed on: what it says is.
        if (plain := _ray.dumps_plain((None, error))) is not None:
            pickle.loads(plain)
            return plain
    return pickle.dumps((None, TransportError(repr(error))))


class LocalClient:
    """Asks a server of this machine; threads may ask at the same time, each over a connection of its own.

    Args:
        address: Where it listens.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._idle: list[_Connection] = []
        self.close = weakref.finalize(self, _close_all, self._idle)
        """Hang up, unless somebody asks; idempotent."""

    def ask(self, method: str, args: tuple[Any, ...], timeout_s: float, check: Callable[[], object]) -> Any:
        """What the server answers.

        Args:
            method: What is asked.
            args: With these arguments.
            timeout_s: How long to wait.
            check: Called about every second; raises where waiting is of no use any more.

        Raises:
            ElsewhereError: The server is none of this machine and user, or this can't go over a socket.
            ConnectionError: The server has ended, or the connection to it.
            TransportTimeoutError: It does not answer within `timeout_s`.
        """
        asked = _ray.dumps_plain((method, args))
        if asked is None:
            raise ElsewhereError
        connection = self._connection()
        try:
            found, error = pickle.loads(connection.ask(asked, timeout_s, check))
        except BaseException:  # An interrupt, say: then an answer may still come.
            connection.close()
            _close_all(self._idle)  # A new connection is read after those that were not even taken yet.
            raise
        self._idle.append(connection)
        if error is not None:
            raise error
        return found

    def _connection(self) -> "_Connection":
        with contextlib.suppress(IndexError):
            while True:
                if (connection := self._idle.pop()).is_ours():
                    return connection
        return _Connection(self._address)


class _Connection:
    """A connection to a server, over which one thread at a time asks."""

    def __init__(self, address: Address) -> None:
        with contextlib.ExitStack() as unless_made:
            try:
                self._socket = unless_made.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                self._socket.settimeout(_SLICE_S)
                self._socket.connect(f"\0{address.name}")
                pid, user, _ = _peer(self._socket)
                if (pid, user) != (address.pid, os.geteuid()):
                    raise ConnectionRefusedError(f"process {pid} of user {user} has the server's address")
                self._file = os.fstat(self._socket.fileno())
            except OSError as error:
                raise ElsewhereError from error
            unless_made.pop_all()

    def is_ours(self) -> bool:
        """Whether its descriptor still is that of the connection; else it is somebody else's by now."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._socket.fileno()), self._file):
                return True
        self._socket.detach()
        return False

    def ask(self, asked: bytes, timeout_s: float, check: Callable[[], object]) -> bytes:
        """What is answered; raises as `LocalClient.ask` does."""
        until = time.monotonic() + timeout_s
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(_SIZE.pack(len(asked)) + asked)
        except TimeoutError:
            raise _late(timeout_s) from None
        self._socket.settimeout(min(_SLICE_S, timeout_s))

        def wait(size: int) -> bytes:
            raw = memoryview(bytearray(size))
            done = 0
            while done < size:
                try:
                    got = self._socket.recv_into(raw[done:])
                except TimeoutError:
                    check()
                    if time.monotonic() >= until:
                        raise _late(timeout_s) from None
                    continue
                if not got:
                    raise ConnectionResetError("its process has ended")
                done += got
            return bytes(raw)

        return wait(*_SIZE.unpack(wait(_SIZE.size)))

    def close(self) -> None:
        if self.is_ours():
            self._socket.close()


def _close_all(connections: list[_Connection]) -> None:
    with contextlib.suppress(IndexError):  # Threads may take some meanwhile.
        while True:
            connections.pop().close()


def _late(timeout_s: float) -> TransportTimeoutError:
    return TransportTimeoutError(f"nothing was answered within {timeout_s:g} s")


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group of the other side."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, group = _CREDENTIALS.unpack(raw)
    return pid, user, group
