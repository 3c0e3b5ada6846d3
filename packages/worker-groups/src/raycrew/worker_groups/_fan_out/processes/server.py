"""The fork server of a host, and its keeper: from them descends all that items run and start.

The *keeper* has imported what items' processes need, forks the *fork server*, and waits. The fork server
forks a process per slot on request, and reports each one's end when nothing of it is left. Both adopt
orphans: what a slot's process leaves behind comes to the fork server, what that leaves behind to the keeper,
and each ends it. The fork server ends when the host or the keeper has ended; only both killed at once leave
anything.
"""

import contextlib
import gc
import os
import selectors
import signal
import socket
import struct
import traceback
from collections.abc import Callable
from typing import NoReturn

from raycrew.worker_groups._fan_out.processes.journal import Journal
from raycrew.worker_groups._fan_out.processes.process import SlotProcess
from raycrew.worker_groups._fan_out.processes.tree import adopt_orphans, end_children, signal_at_parents_end

REQUEST = struct.Struct("=q")
"""Fork: the slot's number; its connection and its journal come along."""
REPORT = struct.Struct("=cqii")
"""Kind, slot, pid, exit status. A descriptor of the process comes with `READY` and `FORKED`."""
READY, FORKED, DIED = b"R", b"F", b"D"


def serve(control_fd: int) -> NoReturn:
    """Be the keeper, of a fork server that obeys the control socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    gc.freeze()
    lifeline, held = os.pipe()
    server = os.fork()
    if server == 0:
        os.close(held)
        _guarded(lambda: ForkServer(socket.socket(fileno=control_fd), lifeline).run())
    os.close(lifeline)
    os.close(control_fd)
    while os.waitpid(-1, 0)[0] != server:
        pass
    end_children()
    os._exit(0)


class ForkServer:
    """Forks, reports and ends slots.

    Args:
        control: The host's requests come, reports go.
        lifeline: A pipe that closes when the keeper ends.
    """

    def __init__(self, control: socket.socket, lifeline: int) -> None:
        self._control = control
        self._lifeline = lifeline
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._slots: dict[int, int] = {}
        self._immortal: set[int] = set()

    def run(self) -> None:
        """Serve until the host or the keeper is gone, then end everything."""
        adopt_orphans()
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._report(READY, 0, os.getpid())
        with selectors.PollSelector() as selector:
            for source in (self._control.fileno(), self._lifeline, self._wake):
                selector.register(source, selectors.EVENT_READ)
            living = True
            while living:
                ready = {key.fd for key, _ in selector.select()}
                if self._wake in ready:
                    self._bury()
                living = self._lifeline not in ready
                if living and self._control.fileno() in ready:
                    living = self._obey()
        end_children()

    def _obey(self) -> bool:
        """Do what the host asks; False when it is gone."""
        message, fds, _, _ = socket.recv_fds(self._control, REQUEST.size, 2)
        if not message:
            return False
        (slot,) = REQUEST.unpack(message)
        pid = self._fork(slot, *fds)
        self._slots[pid] = slot
        for fd in fds:
            os.close(fd)
        self._report(FORKED, slot, pid)
        return True

    def _fork(self, slot: int, connection_fd: int, journal_fd: int) -> int:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            _guarded(lambda: self._become(slot, connection_fd, journal_fd, server))
        return pid

    def _become(self, slot: int, connection_fd: int, journal_fd: int, server: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._control.close()
        for fd in (self._lifeline, self._wake, self._woken):
            os.close(fd)
        for fd in (connection_fd, journal_fd):
            os.set_inheritable(fd, False)
        os.setsid()
        signal_at_parents_end(signal.SIGKILL)
        adopt_orphans()
        if os.getppid() == server:  # else it ended before the kernel was asked to tell
            SlotProcess(slot, socket.socket(fileno=connection_fd), Journal(journal_fd)).run()

    def _bury(self) -> None:
        """Report the slots that have ended, once what they started has ended too."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        dead = []
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if ended[0] in self._slots:
                    dead.append((self._slots.pop(ended[0]), *ended))
        if dead:
            self._immortal |= end_children(self._slots.keys() | self._immortal)
        for slot, pid, status in dead:
            self._report(DIED, slot, pid, os.waitstatus_to_exitcode(status))

    def _report(self, kind: bytes, slot: int, pid: int, status: int = 0) -> None:
        message = REPORT.pack(kind, slot, pid, status)
        with contextlib.suppress(OSError):  # the host is gone: the next request says so, and ends all
            if kind == DIED:
                self._control.send(message)
                return
            fd = os.pidfd_open(pid)
            try:
                socket.send_fds(self._control, [message], [fd])
            finally:
                os.close(fd)


def _guarded(life: Callable[[], None]) -> NoReturn:
    """Run a forked process's life: nothing may run on into its parent's."""
    code = 1
    try:
        life()
        code = 0
    except BaseException:  # noqa: BLE001 - told on stderr, and by the exit code
        traceback.print_exc()
    finally:
        os._exit(code)
