"""A server's process: started, listened to, and ended with all that it has started."""

import logging
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO

import psutil

from raycrew.worker_groups._on_nodes import Lookout, Process, kill, marked, process_of, runs
from raycrew.worker_groups.services.errors import ServiceStartError

logger = logging.getLogger(__name__)

_TAIL_LINES = 40
_LINE_BYTES = 4096
_POLL_S, _LOOK_S = 0.02, 0.2
_LOOK_AGAIN_S = 5.0  # each look reads the node's whole process table
_KILL_S = 10.0


class ServerProcess:
    """Runs from when it is made.

    Args:
        words: The command.
        env: Its environment.
        cwd: Its working directory; None for this process's.
        told: What it reads from its standard input.
        hidden: What is taken out of its output.

    Raises:
        ServiceStartError: It can't be started.
    """

    def __init__(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        *,
        cwd: str | None = None,
        told: bytes = b"",
        hidden: str | None = None,
    ) -> None:
        own, mark = marked(env)
        try:
            self._process = subprocess.Popen(
                list(words),
                env=own,
                cwd=cwd,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise ServiceStartError(f"its server can't be started as {words[0]!r}: {error}") from error
        self._lookout = Lookout()
        self._family = self._lookout.family(process_of(self._process.pid), mark)
        self._lines: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._listener: Process | None = None
        self._looked_at = float("-inf")
        self._hidden = hidden.encode() if hidden else None
        self._listening = threading.Thread(target=self._listen, name="raycrew-server-output", daemon=True)
        self._listening.start()
        self._tell(told)

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """What it ended with, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def tail(self) -> str:
        """The last lines of its output."""
        return b"\n".join(list(self._lines)).decode(errors="replace")

    def await_exit(self, timeout_s: float) -> bool:
        """Wait until it has ended; whether it has."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def listens_on(self, port: int) -> bool:
        """Whether it, or a process that it has started, listens on a port.

        Looks for all of these now and then, also while the one that listened before does.
        """
        is_due = time.monotonic() - self._looked_at >= _LOOK_AGAIN_S
        with suppress(OSError):  # the processes can't be read now
            if not is_due and self._listener is not None and _listens(self._listener, port):
                return True
            members = sorted(self._members(), key=lambda member: member != self._listener)
            self._listener = next((member for member in members if _listens(member, port)), None)
            return self._listener is not None
        return False

    def end(self, grace_s: float) -> bool:
        """End it with all that it has started; whether nothing is left.

        What has no mark of it is known only while its parents are there, so that is looked for before, too.

        Args:
            grace_s: How long it may take by itself, after a SIGTERM.
        """
        if grace_s > 0 and self.exit_code is None:
            self._end_by_itself(grace_s)
        deadline = time.monotonic() + _KILL_S
        while left := self._members():
            for process in left:
                kill(process)
            self._process.poll()
            if time.monotonic() >= deadline:
                logger.warning("processes of a server can't be ended: %s", [process.pid for process in left])
                return False
            time.sleep(_POLL_S)
        self.await_exit(_KILL_S)
        self._listening.join(1.0)  # for its last words
        return True

    def _end_by_itself(self, grace_s: float) -> None:
        until = time.monotonic() + grace_s
        with suppress(OSError):  # the processes can't be read now
            self._members()
        self._process.send_signal(signal.SIGTERM)
        while not self.await_exit(max(min(_LOOK_S, until - time.monotonic()), 0.0)):
            if time.monotonic() >= until:
                return
            with suppress(OSError):
                self._members()

    def _members(self) -> list[Process]:
        self._lookout.look()
        self._looked_at = time.monotonic()
        return list(self._family.members)

    def _tell(self, told: bytes) -> None:
        if self._process.stdin is not None:
            with suppress(BrokenPipeError), self._process.stdin as stdin:
                stdin.write(told)

    def _listen(self) -> None:
        """Pass its output on, and remember the end of it."""
        output = self._process.stdout
        if output is None:
            return
        with output, suppress(ValueError, OSError):
            for line in _without(self._hidden, output):
                self._lines.append(line.rstrip(b"\r\n"))
                with suppress(OSError):
                    os.write(2, line)


def _without(hidden: bytes | None, output: IO[bytes]) -> Iterator[bytes]:
    """Lines, long ones in pieces, without what is hidden; no piece ends in the middle of that."""
    kept, overlap = b"", len(hidden or b".") - 1
    while piece := output.readline(_LINE_BYTES):
        line = kept + piece if hidden is None else (kept + piece).replace(hidden, b"...")
        end = len(line) if line.endswith(b"\n") else max(len(line) - overlap, 0)
        kept = line[end:]
        if end:
            yield line[:end]
    if kept:
        yield kept


def _listens(process: Process, port: int) -> bool:
    if not runs(process):
        return False
    with suppress(psutil.Error):
        sockets = psutil.Process(process.pid).net_connections("tcp")
        return any(s.status == psutil.CONN_LISTEN and s.laddr.port == port for s in sockets)
    return False
