"""One command, from its start to the end of all that it leaves in its process group."""

import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from raycrew.cluster_core._command_line.running.signals import ENDS, Signals, held_back
from raycrew.cluster_core._command_line.running.terminal import Terminal

NOT_FOUND, NOT_RUNNABLE = 127, 126
_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.05
# What a keyboard sends is for the whole group, as a terminal does it; the rest is for the command alone.
_FOR_ALL = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGCONT)
_ASKS_TO_END = (signal.SIGTERM, signal.SIGHUP)


class CommandError(OSError):
    """A command can't be started.

    Attributes:
        code: Exit code that says so: 127 where it is not found, else 126.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def check_command(name: str, environ: Mapping[str, str]) -> None:
    """Refuse what surely can't be started, before a cluster is.

    Raises:
        CommandError: It is not there, or not executable.
    """
    path = environ.get("PATH")
    if shutil.which(name, path=path) is None:
        is_there = shutil.which(name, os.F_OK, path) or ("/" in name and Path(name).exists())
        said, code = ("not executable", NOT_RUNNABLE) if is_there else ("no such command", NOT_FOUND)
        raise CommandError(f"{name}: {said}", code)


class Child:
    """A command in a process group of its own, to which signals of this process are passed on.

    As the group is its own, a signal reaches it once, whether it was sent to this process or to all of its
    group, as terminals and shells do. What is left in the group when the command has ended is ended, too.

    Args:
        command: The command and its arguments.
        environ: Its environment.
        grace_s: Seconds from a SIGTERM or SIGHUP until it is killed, with all that it has started.

    Raises:
        CommandError: It can't be started.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], grace_s: float) -> None:
        self._grace_s, self._kill_at = grace_s, float("inf")
        try:
            with held_back() as be_itself:
                self._process = subprocess.Popen(
                    command,
                    env=dict(environ),
                    process_group=0,
                    preexec_fn=_asked_to_end_with_this_process(be_itself),  # As this process has one thread.
                )
        except OSError as error:
            code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUNNABLE
            raise CommandError(f"{command[0]}: {error.strerror}", code) from error
        self._group = self._process.pid

    def run(self, signals: Signals, terminal: Terminal) -> int:
        """Wait until it has ended; its exit code, or 128 + N where signal N ended it.

        What it leaves in its group is asked to end, too, and killed after the same time, or at once if
        another signal asks for an end meanwhile.
        """
        try:
            self._wait(signals, terminal)
            return self._end_rest(signals)
        except BaseException:  # Nobody else would end it.
            self._kill()
            raise

    def _wait(self, signals: Signals, terminal: Terminal) -> None:
        while not self._has_ended():
            numbers, _ = signals.wait(self._until_kill())
            for number in numbers:
                self._pass_on(number)
            if time.monotonic() >= self._kill_at:
                self._kill()
                self._kill_at = float("inf")
            self._look_for_stops(terminal)
            self._reap()

    def _has_ended(self) -> bool:
        """Whether it has, its process id being kept from others until `_end_rest`."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _until_kill(self) -> float | None:
        left = self._kill_at - time.monotonic()
        return max(0.0, left) if left < float("inf") else None

    def _pass_on(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return
        if number == signal.SIGTSTP and not _can_be_continued():
            return
        if number in _FOR_ALL:
            self._send(number)
        else:
            with suppress(PermissionError):  # It became somebody else's.
                os.kill(self._process.pid, number)  # Not by Popen, which may take its code away.
        if number in _ASKS_TO_END:
            self._send(signal.SIGCONT)  # Who is stopped does not hear of it.
            self._kill_at = min(self._kill_at, time.monotonic() + self._grace_s)
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    def _look_for_stops(self, terminal: Terminal) -> None:
        """Do what a shell does for a job that wants the terminal, or that was stopped from there."""
        stopped = None
        with suppress(ChildProcessError):  # It has just ended.
            stopped = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG)
        if stopped is None:
            return
        if stopped.si_status in (signal.SIGTTIN, signal.SIGTTOU):
            if terminal.lend(self._group):
                self._send(signal.SIGCONT)
            elif _can_be_continued():
                os.kill(0, stopped.si_status)  # It goes on when this job is in the foreground again.
        elif stopped.si_status == signal.SIGTSTP and terminal.is_lent:
            if _can_be_continued():
                os.kill(0, signal.SIGTSTP)
            else:
                self._send(signal.SIGCONT)

    def _end_rest(self, signals: Signals) -> int:
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)  # Who is stopped does not hear of it.
        signals.wait(0)  # What came until now was for the command.
        code = self._process.wait()
        deadline = min(self._kill_at, time.monotonic() + self._grace_s)
        while self._is_inhabited():
            if time.monotonic() >= deadline:
                self._send(signal.SIGKILL)
                break
            numbers, _ = signals.wait(_LOOK_S)
            if not ENDS.isdisjoint(numbers):
                deadline = 0.0
        return code if code >= 0 else 128 - code

    def _kill(self) -> None:
        """Kill the group, and what it started in other ones, as a run within this one does."""
        started: list[psutil.Process] = []
        try:
            started = _descendants(self._process.pid)
        finally:
            self._send(signal.SIGKILL)
        for one in started:
            with suppress(psutil.Error):  # It has ended, or is somebody else's.
                one.kill()

    def _reap(self) -> None:
        """Reap what was adopted, as the first process of a container has to.

        The keeper may be among what has ended; `Popen` takes it for that, too.
        """
        with suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid == self._process.pid:
                    return
                os.waitpid(ended.si_pid, os.WNOHANG)

    def _is_inhabited(self) -> bool:
        """Whether anybody is left in its group."""
        self._reap()
        try:
            os.killpg(self._group, 0)
        except OSError:
            return False
        return True

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # It has ended, or became somebody else's.
            os.killpg(self._group, number)


def _descendants(pid: int) -> list[psutil.Process]:
    """What a process has started, and what that has, as far as this user may see it."""
    started = defaultdict(list)
    for one in psutil.process_iter(["ppid"]):
        started[one.info["ppid"]].append(one)
    found = started.pop(pid, [])
    for one in found:
        found += started.pop(one.pid, [])
    return found


def _can_be_continued() -> bool:
    """Whether there may be a shell that continues this process where it is stopped."""
    return os.getsid(0) != os.getpid()


def _asked_to_end_with_this_process(be_itself: Callable[[], None]) -> Callable[[], None]:
    """What a command does before it begins, so that it hears of this process's death, even by SIGKILL."""
    library, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def ask() -> None:
        library.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(NOT_RUNNABLE)  # It died before.
        be_itself()

    return ask
