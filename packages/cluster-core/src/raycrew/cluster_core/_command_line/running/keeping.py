"""The keeper of a cluster, as `raycrew run` sees it: asked once, told once, and let go."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from raycrew.cluster_core._command_line.running.signals import ENDS, Signals
from raycrew.cluster_core._command_line.running.wishes import Wish

_START_S, _END_S, _KILL_S = 300.0, 30.0, 5.0
_COMMAND = (sys.executable, "-P", "-m", "raycrew.cluster_core._command_line.running.keeper")


class InterruptedStartError(Exception):
    """A signal asked for an end before there was a cluster.

    Attributes:
        number: The signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


class NoKeeperError(Exception):
    """There is no cluster, as the keeper says.

    Attributes:
        kind: Name of the error's class.
        message: What it says.
        advice: What to do.
    """

    def __init__(self, kind: str, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.kind, self.message, self.advice = kind, message, advice


@dataclass(frozen=True, slots=True)
class Found:
    """The cluster of a command.

    Attributes:
        address: Its address.
        started: Whether it was started for the command.
        why: What led to it.
        env: Variables by which a child joins it; they may hold its token.
    """

    address: str
    started: bool
    why: str
    env: Mapping[str, str] = field(repr=False)


class Keeper:
    """A process that finds or starts a cluster, and ends what it started when this is closed or dies.

    Args:
        wish: What is wanted.
        signals: Signals of this process. One that asks for an end cuts short what is waited for.
    """

    def __init__(self, wish: Wish, signals: Signals) -> None:
        self._signals = signals
        asked, self._input = os.pipe()
        self._output, told = os.pipe()
        stderr = subprocess.DEVNULL if sys.stderr is None else None
        self._process = subprocess.Popen(
            _COMMAND, stdin=asked, stdout=told, stderr=stderr, start_new_session=True
        )
        os.close(asked)
        os.close(told)
        self._told = b""
        with suppress(BrokenPipeError):  # It has ended; `found` tells of it.
            os.write(self._input, json.dumps(wish.as_json()).encode() + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._input)
        os.close(self._output)
        if not self._ends_within(_END_S):
            self._process.terminate()
            if not self._ends_within(_KILL_S):
                self._process.kill()
                self._process.wait()

    def found(self) -> Found:
        """Wait for the cluster.

        Raises:
            InterruptedStartError: A signal asks for an end first.
            NoKeeperError: There is none.
        """
        deadline = time.monotonic() + _START_S
        while not self._told.endswith(b"\n"):
            numbers, is_readable = self._signals.wait(max(0.0, deadline - time.monotonic()), [self._output])
            for number in numbers:
                if number in ENDS:
                    raise InterruptedStartError(number)
            if is_readable:
                part = os.read(self._output, 65536)
                if not part:
                    raise NoKeeperError("", "the process that looks for the cluster has died")
                self._told += part
            elif time.monotonic() >= deadline:
                raise NoKeeperError("", f"no cluster was found or started within {_START_S:g} s")
        answer: dict[str, Any] = json.loads(self._told)
        if "error" in answer:
            raise NoKeeperError(**answer["error"])
        return Found(**answer)

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone, and with it a cluster that it started."""
        return self._process.poll() is not None

    def _ends_within(self, seconds: float) -> bool:
        """Whether it does; nobody waits on once a signal asks for an end."""
        deadline = time.monotonic() + seconds
        while not self.has_ended and (left := deadline - time.monotonic()) > 0:
            numbers, _ = self._signals.wait(left)  # SIGCHLD tells of its end.
            if not ENDS.isdisjoint(numbers):
                break
        return self.has_ended
