"""The process in which items run, one batch after the other.

Its states, and what it says in each, stand in docs/fan-out-protocol.md.
"""

import contextlib
import logging
import os
import pickle
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from raycrew.worker_groups._fan_out.processes.code import Code, Library, UnloadableError, dumps
from raycrew.worker_groups._fan_out.processes.journal import LOADING, Journal, Stamp
from raycrew.worker_groups._fan_out.processes.tree import children, end_children

logger = logging.getLogger(__name__)

LENGTH = struct.Struct("=Q")
ANSWER = struct.Struct("=cqqq")
"""Its kind, and whose it is."""
DONE, UNLOADABLE = b"D", b"U"


def pack_batch(
    batch: int, variables: Mapping[str, str], initializer: Code | None, function: Code, payloads: list[bytes]
) -> bytes:
    """A batch as it goes to the process, with the variables that it sets first."""
    body = pickle.dumps((batch, dict(variables), initializer, function, payloads), protocol=5)
    return LENGTH.pack(len(body)) + body


class _Surroundings:
    """What each item finds as the one before it did: the working directory, and some variables.

    Args:
        names: Of those variables.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._home = os.getcwd()  # noqa: PTH109 - for every item
        self._variables = {name: os.environ.get(name) for name in names}

    def put_back(self) -> None:
        """Undo what an item has changed of it."""
        _go_back(self._home)
        for name, value in self._variables.items():
            if value is None:
                os.environ.pop(name, None)
            elif os.environ.get(name) != value:
                os.environ[name] = value


class SlotProcess:
    """Runs batches until its host closes the connection.

    Args:
        slot: Number of its slot.
        connection: Batches come, answers go.
        journal: Where it writes down what it does.
    """

    def __init__(self, slot: int, connection: socket.socket, journal: Journal) -> None:
        self._slot = slot
        self._pid = os.getpid()
        self._connection = connection
        self._journal = journal
        self._library = Library()
        self._spare: set[int] = set()
        self._names: set[str] = set()

    def run(self) -> None:
        """Take batches, run them and answer."""
        while (header := _receive(self._connection, LENGTH.size)) is not None:
            message = _receive(self._connection, LENGTH.unpack(header)[0])
            if message is None:
                return
            self._batch(*pickle.loads(message))

    def _batch(
        self,
        batch: int,
        variables: Mapping[str, str],
        initializer: Code | None,
        code: Code,
        payloads: list[bytes],
    ) -> None:
        stamp = Stamp(self._slot, batch, self._pid)
        self._journal.begin(stamp)
        os.environ.update(variables)
        self._names.update(variables)
        try:
            function = self._load(initializer, code)
        except UnloadableError as error:
            self._journal.finish(LOADING, False, 0.0, str(error).encode())
            self._answer(UNLOADABLE, stamp)
            return
        found = _Surroundings(self._names)
        for position, payload in enumerate(payloads):
            self._item(function, position, payload, found)
        with contextlib.suppress(OSError, ValueError):  # an item may have closed it
            if sys.__stdout__ is not None:
                sys.__stdout__.flush()
        self._answer(DONE, stamp)

    def _load(self, initializer: Code | None, code: Code) -> Callable[[Any], Any]:
        if initializer is not None:
            self._library.initialize(initializer)
        self._journal.start(LOADING)
        function = self._library.load(code, initializer)
        self._journal.end_strays()
        if code.data is not None or (initializer is not None and initializer.data is not None):
            self._spare |= children()  # what an initializer or an import starts is for all items
        return function

    def _item(
        self, function: Callable[[Any], Any], position: int, payload: bytes, found: _Surroundings
    ) -> None:
        self._journal.start(position)
        started = time.perf_counter()
        try:
            value = function(pickle.loads(payload))
            seconds = time.perf_counter() - started
            self._journal.end_strays()
            ok, data = True, dumps(value)
        except BaseException as error:  # noqa: BLE001 - whatever an item raises is that item's result
            seconds = time.perf_counter() - started
            self._journal.end_strays()
            ok, data = False, _pack_failure(error)
        found.put_back()
        self._spare |= end_children(self._spare)
        self._journal.finish(position, ok, seconds, data)

    def _answer(self, kind: bytes, stamp: Stamp) -> None:
        self._journal.end_strays()
        self._connection.sendall(ANSWER.pack(kind, *stamp))


def _receive(connection: socket.socket, size: int) -> bytes | None:
    """`size` bytes, or None when the other side has closed."""
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _go_back(home: str) -> None:
    """Put the working directory back, where an item has changed it."""
    try:
        if os.getcwd() == home:  # noqa: PTH109 - for every item
            return
    except FileNotFoundError:  # the item has removed the one it went to
        pass
    os.chdir(home)


def _pack_failure(error: BaseException) -> bytes:
    """Pickle an exception (None if it would not survive that), its type's name, message and traceback.

    The exception is a pickle of its own: its class may not be there where the others are read.
    """
    trace = "".join(traceback.format_exception(error))
    name, message = type(error).__qualname__, _message(error)
    try:
        data: bytes | None = dumps(error)
        pickle.loads(data)  # type: ignore[arg-type]
    except BaseException:  # noqa: BLE001 - exceptions with odd constructors do not come back from a pickle
        data = None
    return dumps((data, name, message, trace))


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a __str__ that raises must not hide the error itself
        return "(its message could not be made)"
