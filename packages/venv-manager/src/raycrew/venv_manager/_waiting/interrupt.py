"""Ctrl-C interrupts the main thread only: here it ends what other threads do, and what they have started."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from raycrew.venv_manager._waiting.forks import PerProcess

T = TypeVar("T")

LOOK_S = 0.2  # of one wait in the kernel: Ctrl-C that comes just before it does not wake it
_OTHERS_WRITE = 0o022  # never, whatever is usual for this user's files: what is installed is run
_DYING_S = 5.0  # that a killed process may take to be gone
_running: set["subprocess.Popen[str]"] = set()
_guard = PerProcess(threading.Lock)
_ending = PerProcess(threading.Event)
os.register_at_fork(after_in_child=_running.clear)


def start(
    command: Sequence[str],
    *,
    environ: Mapping[str, str],
    cwd: str | Path | None,
    pass_fds: Sequence[int] = (),
) -> "subprocess.Popen[str]":
    """Start a process in a session of its own, with its output in pipes; to be ended by `end`.

    Raises:
        OSError: It cannot be started.
        KeyboardInterrupt: Ctrl-C ends all that this process does here.
    """
    stop_if_interrupted()

    def begin() -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            command, cwd=cwd, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
            pass_fds=tuple(pass_fds), umask=_umask() | _OTHERS_WRITE,
        )  # fmt: skip
        with _guard.here:
            _running.add(process)
        return process

    if threading.current_thread() is not threading.main_thread():
        return begin()
    try:
        with ThreadPoolExecutor(1) as beside:  # Ctrl-C cannot come between the start and its record there
            return result_of(beside.submit(begin))
    except KeyboardInterrupt:
        end_all()
        raise


def _umask() -> int:
    """This process's; to ask for it by setting it would have other threads write by it."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next((int(line.split()[1], 8) for line in lines if line.startswith("Umask:")), 0)


def end(process: "subprocess.Popen[str]") -> None:
    """Wait for a process that has ended; kill it with its children if it has not."""
    _kill(process)
    process.wait()
    with _guard.here:
        _running.discard(process)


def _kill(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def stop_if_interrupted() -> None:
    """Called by what waits or starts something.

    Raises:
        KeyboardInterrupt: Ctrl-C ends all that this process does here.
    """
    if _ending.here.is_set():
        raise KeyboardInterrupt


def result_of(future: "Future[T]") -> T:
    """What a future came to, however it ended."""
    await_all([future])
    return future.result()


def await_all(futures: Iterable["Future[T]"]) -> None:
    """Return when all have ended, however they did."""
    waited_for = list(futures)
    while wait(waited_for, LOOK_S).not_done:
        pass


@contextlib.contextmanager
def workers(count: int) -> Iterator[Executor]:
    """Threads that are waited for; Ctrl-C ends what they do, queue and wait for."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    except KeyboardInterrupt:
        _end(pool)
        raise
    finally:
        pool.shutdown()


def _end(pool: Executor) -> None:
    done = threading.Thread(target=pool.shutdown, kwargs={"cancel_futures": True}, daemon=True)
    done.start()
    try:
        while done.is_alive():
            _ending.here.set()  # each time: pools within this one clear it when they have ended
            end_all()
            done.join(LOOK_S)
    finally:
        _ending.here.clear()


def end_all() -> None:
    """Kill all that was started here and still runs, and see it gone."""
    with _guard.here:
        running = list(_running)
    for process in running:
        _kill(process)
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_DYING_S)
