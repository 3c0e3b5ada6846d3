"""The actor on each node that owns the processes and gives them batches."""

import contextlib
import logging
import os
import pathlib
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Literal

import ray

from raycrew.worker_groups.fan_out import _process
from raycrew.worker_groups.fan_out._journal import LOADING, Journal, finished

logger = logging.getLogger(__name__)

FORK_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 300.0
CONTROL = "control"
"""Threads of their own for what must get through even when every thread for batches waits."""
_SERVER = "import sys; sys.path[:] = {path!r}; from {module} import serve; serve({fd})"

Stop = Literal["done", "timeout", "crash", "unloadable", "lost", "cancelled"]


@dataclass(frozen=True, slots=True)
class BatchReport:
    """How a batch ended.

    Attributes:
        stop: Why it ended: `done`; the item after the finished ones ran past its time (`timeout`) or ended
            its process (`crash`); the function could not be loaded (`unloadable`); the process was lost
            through no fault of an item (`lost`); or the call was given up (`cancelled`).
        journal: The finished items, for `_journal.finished`.
        detail: Exit status or traceback, in words.
    """

    stop: Stop
    journal: bytes
    detail: str = ""


@dataclass(eq=False)
class _Slot:
    connection: socket.socket
    journal: Journal
    pid: int = 0
    exit_status: int | None = None
    known: OrderedDict[str, None] = field(default_factory=OrderedDict)
    forked: threading.Event = field(default_factory=threading.Event)
    dead: threading.Event = field(default_factory=threading.Event)
    call_id: str = ""

    def message(self, key: str, function: bytes, payloads: list[bytes]) -> bytes:
        """The batch as bytes; the function goes along when this process doesn't hold it."""
        data = None if key in self.known else function
        self.known[key] = None
        self.known.move_to_end(key)
        if len(self.known) > _process.FUNCTIONS_KEPT:
            self.known.popitem(last=False)
        body = pickle.dumps((key, data, payloads), protocol=5)
        return _process.LENGTH.pack(len(body)) + body

    def close(self) -> None:
        """Close this side's descriptors; a living process ends on that."""
        with contextlib.suppress(OSError):
            self.connection.close()
        with contextlib.suppress(OSError):
            os.close(self.journal.fd)


class ForkServer:
    """A fork server's process, and the thread that hears about deaths."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = _SERVER.format(path=sys.path, module=_process.__name__, fd=theirs.fileno())
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            stdin=subprocess.DEVNULL,
            # An item that calls Ray fails, rather than join the cluster as one more driver.
            env={**os.environ, "RAY_ENABLE_AUTO_CONNECT": "0"},
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        theirs.close()
        self._control = ours
        self._lock = threading.Lock()
        self._awaiting: deque[_Slot] = deque()
        self._slots: dict[int, _Slot] = {}
        self.alive = True
        threading.Thread(target=self._listen, name="fan-out-listener", daemon=True).start()

    def fork(self) -> _Slot:
        """A fresh slot.

        Raises:
            ConnectionError: The server is gone.
        """
        ours, theirs = socket.socketpair()
        slot = _Slot(ours, Journal(os.memfd_create("raycrew-journal")))
        try:
            with self._lock:
                if not self.alive:
                    raise ConnectionError("the fork server has died")
                self._awaiting.append(slot)  # before the request, whose answer the listener may be quick with
                request = _process.REQUEST.pack(_process.FORK, 0)
                try:
                    socket.send_fds(self._control, [request], [theirs.fileno(), slot.journal.fd])
                except OSError:
                    self._awaiting.pop()
                    raise
            if not slot.forked.wait(FORK_TIMEOUT_S) or slot.dead.is_set():
                raise ConnectionError("the fork server does not answer")
        except OSError:
            slot.close()
            raise
        finally:
            theirs.close()
        return slot

    def kill(self, slot: _Slot) -> None:
        """End a slot and everything it has started, and wait for its end."""
        with contextlib.suppress(OSError):
            if not slot.dead.is_set():
                self._control.send(_process.REQUEST.pack(_process.KILL, slot.pid))
        slot.dead.wait(FORK_TIMEOUT_S)

    def close(self) -> None:
        """End the server, and so all slots."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._process.wait(FORK_TIMEOUT_S)

    def _listen(self) -> None:
        while True:
            try:
                message = self._control.recv(_process.REPORT.size)
            except OSError:
                message = b""
            if not message:
                break
            kind, pid, status = _process.REPORT.unpack(message)
            if kind == _process.FORKED:
                slot = self._awaiting.popleft()
                slot.pid = pid
                self._slots[pid] = slot
                slot.forked.set()
            else:
                self._bury(self._slots.pop(pid), status)
        with self._lock:
            self.alive = False
            orphans = [*self._awaiting, *self._slots.values()]
        for slot in orphans:
            self._bury(slot, None)
        self._control.close()
        self._process.wait()

    @staticmethod
    def _bury(slot: _Slot, status: int | None) -> None:
        slot.exit_status = status
        slot.dead.set()
        slot.forked.set()
        # A grandchild may hold a copy of the slot's end open, so its death alone may not wake the reader.
        with contextlib.suppress(OSError):
            slot.connection.shutdown(socket.SHUT_RDWR)


class FanOutHost:
    """The actor: at most `limit` batches run at a time, each in a process of its own."""

    def __init__(self) -> None:
        self._server = ForkServer()
        self._free: list[_Slot] = []
        self._running: set[_Slot] = set()
        self._cancelled: deque[str] = deque(maxlen=1000)
        self._busy = 0
        self._turn = threading.Condition()

    @ray.method(concurrency_group=CONTROL)
    def ready(self) -> str:
        """Node id of this host, once it can run batches."""
        self._free.append(self._server.fork())
        node_id: str = ray.get_runtime_context().get_node_id()
        return node_id

    def run(
        self,
        call_id: str,
        limit: int,
        key: str,
        function: bytes,
        payloads: list[bytes],
        timeout_s: float | None,
    ) -> BatchReport:
        """Run one batch; it ends early at an item that does not end by itself."""
        with self._turn:
            while self._busy >= limit and call_id not in self._cancelled:
                self._turn.wait()
            if call_id in self._cancelled:
                return BatchReport("cancelled", b"")
            self._busy += 1
        try:
            return self._run(call_id, key, function, payloads, timeout_s)
        finally:
            with self._turn:
                self._busy -= 1
                self._turn.notify_all()

    @ray.method(concurrency_group=CONTROL)
    def cancel(self, call_id: str) -> None:
        """Give up a call: what waits is not started, what runs is killed."""
        with self._turn:
            self._cancelled.append(call_id)
            self._turn.notify_all()
            for slot in self._running:  # under the lock, so that none is given to another call meanwhile
                if slot.call_id == call_id:
                    self._server.kill(slot)

    @ray.method(concurrency_group=CONTROL)
    def statistics(self) -> dict[str, int]:
        """Processes, threads and file descriptors of this host, to show that nothing leaks."""
        with self._turn:
            processes = len(self._free) + len(self._running)
        descriptors = sum(1 for _ in pathlib.Path("/proc/self/fd").iterdir())
        return {"processes": processes, "threads": threading.active_count(), "descriptors": descriptors}

    def _run(
        self, call_id: str, key: str, function: bytes, payloads: list[bytes], timeout_s: float | None
    ) -> BatchReport:
        try:
            slot = self._take(call_id)
        except ConnectionError as error:
            return BatchReport("lost", b"", str(error))
        if slot is None:
            return BatchReport("cancelled", b"")
        try:
            report = self._supervise(slot, slot.message(key, function, payloads), timeout_s)
            if report.stop == "unloadable":
                del slot.known[key]
            if call_id in self._cancelled:
                return BatchReport("cancelled", b"")
            return report
        except BaseException:
            self._server.kill(slot)  # whatever it is doing must not be taken for the next batch
            raise
        finally:
            self._give_back(slot)

    def _take(self, call_id: str) -> _Slot | None:
        """A slot that `cancel` will find, None where the call was given up already."""
        with self._turn:
            slot = self._free.pop() if self._free else None
        if slot is None or slot.dead.is_set():
            if slot is not None:
                slot.close()
            slot = self._fork()
        with self._turn:
            if call_id in self._cancelled:
                self._free.append(slot)
                return None
            slot.call_id = call_id
            self._running.add(slot)
        return slot

    def _fork(self) -> _Slot:
        """A fresh slot, from another fork server if this one has died: no item is to blame for that."""
        server = self._server
        try:
            return server.fork()
        except ConnectionError as error:
            logger.warning("starting another fork server on this node: %s", error)
            server.close()
        with self._turn:
            if self._server is server:
                self._server = ForkServer()
        return self._server.fork()

    def _give_back(self, slot: _Slot) -> None:
        with self._turn:
            self._running.discard(slot)
            slot.call_id = ""
            if not slot.dead.is_set():
                self._free.append(slot)
                return
        slot.close()

    def _supervise(self, slot: _Slot, message: bytes, timeout_s: float | None) -> BatchReport:
        slot.journal.reset()
        try:
            slot.connection.sendall(message)
            answer, overtime = self._wait(slot, timeout_s)
        except OSError:  # it died while we were sending
            answer, overtime = b"", None
        if answer == b".":
            return BatchReport("done", slot.journal.read())
        if answer == b"U":
            trace = next(finished(slot.journal.read())).payload.decode()
            return BatchReport("unloadable", b"", trace)
        slot.dead.wait(FORK_TIMEOUT_S)
        return _post_mortem(slot, overtime)

    def _wait(self, slot: _Slot, timeout_s: float | None) -> tuple[bytes, int | None]:
        """The slot's answer (empty: dead), and the position of an item that was killed for its time."""
        poll = select.poll()
        poll.register(slot.connection, select.POLLIN)
        if timeout_s is None:
            poll.poll()
            return slot.connection.recv(1), None
        wait_s = timeout_s
        while not poll.poll(1000 * wait_s + 1):
            position, started = slot.journal.current()
            allowed_s = max(timeout_s, LOAD_TIMEOUT_S) if position == LOADING else timeout_s
            wait_s = started + allowed_s - time.monotonic()
            if wait_s <= 0:
                self._server.kill(slot)
                return b"", position
        return slot.connection.recv(1), None


def _post_mortem(slot: _Slot, overtime: int | None) -> BatchReport:
    """Whose fault a process's death was: the item that had started and not finished, or nobody's."""
    data = slot.journal.read()
    position, _ = slot.journal.current()
    done = sum(1 for _ in finished(data))
    how = "was lost" if slot.exit_status is None else _in_words(slot.exit_status)
    if position == LOADING:
        if slot.exit_status is None:
            return BatchReport("lost", b"", how)
        return BatchReport("unloadable", b"", f"the process {how} while it loaded the function")
    if slot.exit_status is None or position != done:
        return BatchReport("lost", data, how)
    if overtime is None:
        return BatchReport("crash", data, how)
    return BatchReport("timeout" if overtime == position else "lost", data, how)


def _in_words(status: int) -> str:
    if status >= 0:
        return f"exited with code {status}"
    return f"was killed by {signal.Signals(-status).name}"
