"""The processes in which items run.

One *fork server* per host: a clean, single-threaded process that has imported Ray's pickler once and forks
*slots* on request. It reports each slot's death, ends a slot with everything the slot has started, and ends
itself and all of them when its host is gone. A slot is the reaper of its own descendants
(`PR_SET_CHILD_SUBREAPER`), so daemonised ones can be found and killed too.
"""

import contextlib
import ctypes
import gc
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import psutil
from ray import cloudpickle

from raycrew.worker_groups.fan_out._journal import Journal

REQUEST = struct.Struct("=ci")
REPORT = struct.Struct("=cii")
LENGTH = struct.Struct("=Q")
FORK, KILL = b"F", b"K"
FORKED, DIED = b"F", b"D"
FUNCTIONS_KEPT = 8
Work = Callable[[Any], Any]
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class UnloadableFunctionError(Exception):
    """The function could not be loaded in the slot's process."""


def receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    """`size` bytes, or None when the other side has closed."""
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def serve(control_fd: int) -> None:
    """The fork server's life: fork, kill and report until the control socket closes."""
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gc.freeze()
    slots: set[int] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is control:
                    message, fds, _, _ = socket.recv_fds(control, REQUEST.size, 2)
                    if not message:
                        for pid in slots:
                            end_tree(pid)
                        return
                    kind, pid = REQUEST.unpack(message)
                    if kind == FORK:
                        slots.add(_fork_slot(control, fds, (wake_read, wake_write)))
                    elif pid in slots:
                        end_tree(pid)
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_read, 4096)
                    _reap(control, slots)


def end_tree(pid: int) -> None:
    """Kill a process and all its descendants, stopping it first so that it can't start more meanwhile."""
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        _kill_descendants(psutil.Process(pid))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _kill_descendants(process: psutil.Process, spare: frozenset[int] = frozenset()) -> None:
    for _ in range(100):  # a fork bomb is outrun, not waited for
        alive = False
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # gone, or another user's by now
                if child.pid not in spare and child.status() != psutil.STATUS_ZOMBIE:
                    child.kill()
                    alive = True
        if not alive:
            return


def _reap(control: socket.socket, slots: set[int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in slots:
            slots.discard(pid)
            # What a crashed slot leaves behind is now a child of ours: every child that is no slot.
            for orphan in psutil.Process().children():
                if orphan.pid not in slots:
                    end_tree(orphan.pid)
            with contextlib.suppress(OSError):
                control.send(REPORT.pack(DIED, pid, os.waitstatus_to_exitcode(status)))


def _fork_slot(control: socket.socket, fds: list[int], close: tuple[int, int]) -> int:
    data_fd, journal_fd = fds
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for fd in close:
                os.close(fd)
            control.close()
            _run_slot(socket.socket(fileno=data_fd), Journal(journal_fd), server)
            code = 0
        except BaseException:  # noqa: BLE001 - nothing may run on into the server's own loop
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(data_fd)
    os.close(journal_fd)
    with contextlib.suppress(OSError):  # the host is gone: the next read says so, and ends all
        control.send(REPORT.pack(FORKED, pid, 0))
    return pid


def _run_slot(connection: socket.socket, journal: Journal, server: int) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != server:
        return  # the server died before the line above
    functions: OrderedDict[str, Work] = OrderedDict()
    while (header := receive_exactly(connection, LENGTH.size)) is not None:
        message = receive_exactly(connection, LENGTH.unpack(header)[0])
        if message is None:
            return
        key, function_bytes, payloads = pickle.loads(message)
        journal.reset()
        try:
            function = _load(functions, key, function_bytes)
        except UnloadableFunctionError as error:
            journal.finish(False, 0.0, str(error).encode())
            connection.sendall(b"U")
            continue
        _run_batch(function, payloads, journal)
        connection.sendall(b".")


def _load(functions: OrderedDict[str, Work], key: str, data: bytes | None) -> Callable[[Any], Any]:
    if data is not None:
        try:
            functions[key] = cloudpickle.loads(data)
        except BaseException:  # noqa: BLE001 - an import may raise anything, SystemExit too
            raise UnloadableFunctionError(traceback.format_exc()) from None
        if len(functions) > FUNCTIONS_KEPT:
            functions.popitem(last=False)
    functions.move_to_end(key)
    return functions[key]


def _run_batch(function: Callable[[Any], Any], payloads: list[bytes], journal: Journal) -> None:
    for position, payload in enumerate(payloads):
        journal.start(position)
        started = time.perf_counter()
        try:
            value = function(pickle.loads(payload))
            seconds = time.perf_counter() - started
            ok, data = True, dumps(value)
        except BaseException as error:  # noqa: BLE001 - whatever an item raises is that item's result
            seconds = time.perf_counter() - started
            ok, data = False, _pack_failure(error)
        journal.finish(ok, seconds, data)
    with contextlib.suppress(OSError, ValueError):  # an item may have closed it
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()


def dumps(value: Any) -> bytes:
    """Pickle by value what can't be imported elsewhere."""
    data: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    return data


def _pack_failure(error: BaseException) -> bytes:
    """Pickle an exception (None if it would not survive that), its type's name, message and traceback."""
    trace = "".join(traceback.format_exception(error))
    name, message = type(error).__qualname__, _message(error)
    try:
        data = dumps((error, name, message, trace))
        pickle.loads(data)
    except BaseException:  # noqa: BLE001 - exceptions with odd constructors do not come back from a pickle
        data = dumps((None, name, message, trace))
    return data


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a __str__ that raises must not hide the error itself
        return "(its message could not be made)"


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
