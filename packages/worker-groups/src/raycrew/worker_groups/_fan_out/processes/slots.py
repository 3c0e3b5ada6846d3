"""The host's side of the processes: a slot for each, and the fork server that makes them."""

import contextlib
import itertools
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from raycrew.worker_groups._fan_out.processes import server as _server
from raycrew.worker_groups._fan_out.processes.code import Code, Kept
from raycrew.worker_groups._fan_out.processes.journal import Journal
from raycrew.worker_groups._fan_out.processes.process import pack_batch

logger = logging.getLogger(__name__)

FORK_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
"""How long a fork server may take to end everything, before it is killed itself."""
_SERVER = "import sys; sys.path[:] = {path!r}; from {module} import serve; serve({fd})"


@dataclass(eq=False)
class Slot:
    """A process for items, as its host knows it."""

    number: int
    connection: socket.socket
    journal: Journal
    pid: int = 0
    pidfd: int = -1
    exit_status: int | None = None
    variables: dict[str, str] = field(default_factory=dict, repr=False)
    functions: Kept[None] = field(default_factory=Kept)
    initializers: Kept[None] = field(default_factory=Kept)
    forked: threading.Event = field(default_factory=threading.Event)
    dead: threading.Event = field(default_factory=threading.Event)
    ended: bool = False
    call_id: str = ""

    def message(
        self,
        batch: int,
        variables: Mapping[str, str],
        initializer: Code | None,
        function: Code,
        payloads: list[bytes],
    ) -> bytes:
        """The batch as bytes; variables and code go along when this process doesn't hold them."""
        news = {name: value for name, value in variables.items() if self.variables.get(name) != value}
        self.variables.update(news)
        ours = None if initializer is None else _unless_known(self.initializers, initializer)
        return pack_batch(batch, news, ours, _unless_known(self.functions, function), payloads)

    def is_idle(self) -> bool:
        """Whether it lives, and has said nothing unasked."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        poll.register(self.pidfd, select.POLLIN)
        return not (self.ended or self.dead.is_set() or poll.poll(0))

    def end(self) -> None:
        """Kill the process, whatever it does; the fork server ends what it leaves behind, then reports."""
        self.ended = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Close this side's descriptors; a living process ends on that."""
        with contextlib.suppress(OSError):
            self.connection.close()
        for fd in (self.journal.fd, self.pidfd):
            if fd >= 0:
                os.close(fd)
        self.journal.fd = self.pidfd = -1


def _unless_known(known: Kept[None], code: Code) -> Code:
    sent = Code(code.key, None) if code.key in known else code
    known.use(code.key, None)
    return sent


class ForkServer:
    """A fork server's process, and the thread that hears its reports."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = _SERVER.format(path=sys.path, module=_server.__name__, fd=theirs.fileno())
        self._process = subprocess.Popen(  # the keeper; the fork server is its child
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
        self._slots: dict[int, Slot] = {}
        self._numbers = itertools.count(1)
        self._pidfd = -1
        self.alive = True
        threading.Thread(target=self._listen, name="fan-out-listener", daemon=True).start()

    def fork(self) -> Slot:
        """A fresh slot.

        Raises:
            ConnectionError: The server is gone.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        slot = Slot(next(self._numbers), ours, Journal(os.memfd_create("raycrew-journal")))
        try:
            self._request(slot, theirs)
            if not slot.forked.wait(FORK_TIMEOUT_S) or slot.dead.is_set():
                raise ConnectionError("the fork server does not answer")
        except OSError:
            self._slots.pop(slot.number, None)
            slot.close()
            raise
        finally:
            theirs.close()
        return slot

    def close(self) -> None:
        """End the server, and so all slots with all they have started, and wait for that."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        for end in (self._kill_server, self._process.kill, None):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_TIMEOUT_S)
                return
            if end is not None:
                logger.warning("the fork server did not end within %.0f s and is killed", END_TIMEOUT_S)
                end()

    def _kill_server(self) -> None:
        """Leave the end to the keeper, which may have been stopped too."""
        self._process.send_signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _request(self, slot: Slot, theirs: socket.socket) -> None:
        with self._lock:
            if not self.alive:
                raise ConnectionError("the fork server has died")
            self._slots[slot.number] = slot  # before the request: the listener may be quick with the answer
            request = _server.REQUEST.pack(slot.number)
            socket.send_fds(self._control, [request], [theirs.fileno(), slot.journal.fd])

    def _listen(self) -> None:
        while True:
            try:
                message, fds, _, _ = socket.recv_fds(self._control, _server.REPORT.size, 1)
            except OSError:
                message, fds = b"", []
            if not message:
                break
            kind, number, pid, status = _server.REPORT.unpack(message)
            self._hear(kind, number, pid, status, fds)
        with self._lock:
            self.alive = False
            orphans = list(self._slots.values())
        self._process.wait()  # the keeper ends when nothing is left
        for slot in orphans:
            self._bury(slot, None)
        self._control.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)

    def _hear(self, kind: bytes, number: int, pid: int, status: int, fds: list[int]) -> None:
        if kind == _server.READY:
            (self._pidfd,) = fds
            return
        slot = self._slots.get(number)
        if kind == _server.DIED:
            if slot is not None and slot.pid == pid:
                del self._slots[number]
                self._bury(slot, status)
            return
        (pidfd,) = fds
        if slot is None:  # given up meanwhile
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
            return
        slot.pid, slot.pidfd = pid, pidfd
        slot.forked.set()

    @staticmethod
    def _bury(slot: Slot, status: int | None) -> None:
        slot.exit_status = status
        slot.dead.set()
        slot.forked.set()
