"""What is told of a worker: its status, what it uses, why it is taken for stuck; pure."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal, Self

from raycrew.worker_groups._on_nodes import BEAT_S

StuckReason = Literal["stopped", "gil_held", "no_progress"]

#: "silent": its heart does not beat. "alive": its process is there, and what it is at can't be told.
#: "unanswered": its node does not tell.
RankState = Literal["ready", "busy", "stopped", "silent", "alive", "dead", "unanswered"]

#: A heart that has missed two beats has stopped.
MISSED_S = 2 * BEAT_S

#: About 30 years: what threads and Ray count in nanoseconds still has room for it.
LONGEST_S = 1e9


@dataclass(frozen=True, slots=True)
class RunningCall:
    """A call that a worker is in.

    Attributes:
        method: Name of the method, at most 72 bytes of it; `__init__` of the constructor.
        sequence: Which of all calls that this worker's process has begun, from 1.
        running_s: Seconds since it began.
        silent_s: Seconds since its last `current_worker().tick()`, or item of a stream, or since it began.
    """

    method: str
    sequence: int
    running_s: float
    silent_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """What a node's watch sees of one worker.

    Attributes:
        is_alive: Whether its process is there.
        is_told: Whether its page can be read; if not, nothing is known of its heart and calls.
        is_stopped: Whether the process is stopped, by a signal or a debugger.
        beat_age_s: Seconds since its heart beat.
        calls: Those that it is in.
        private_bytes: Memory that is its own alone.
        resident_bytes: Memory that it uses, shared with others or not.
        device_bytes: What torch has reserved on devices.
        cpu: Cores that it and all that it has started keep busy.
        n_processes: How many those are.
        ended_at_bytes: Private memory for which the watch has ended it.
        started_bytes: Private memory of all that it has started.
    """

    is_alive: bool
    is_told: bool = False
    is_stopped: bool = False
    beat_age_s: float | None = None
    calls: tuple[RunningCall, ...] = ()
    private_bytes: int | None = None
    resident_bytes: int | None = None
    device_bytes: int | None = None
    cpu: float | None = None
    n_processes: int | None = None
    ended_at_bytes: int | None = None
    started_bytes: int | None = None

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Self:
        """What a watch's answer says."""
        return cls(**{**answer, "calls": tuple(RunningCall(*call) for call in answer.get("calls", ()))})

    @property
    def is_late(self) -> bool:
        """Whether its heart does not beat."""
        return self.beat_age_s is not None and self.beat_age_s > MISSED_S

    @property
    def is_idle(self) -> bool:
        """Whether it could answer at once, as far as is seen."""
        return not (self.is_stopped or self.is_late or self.calls)

    @property
    def state(self) -> RankState:
        """What it is up to, as far as is seen."""
        if not self.is_alive:
            return "dead"
        if self.is_stopped:
            return "stopped"
        if not self.is_told:
            return "alive"
        if self.is_late:
            return "silent"
        return "busy" if self.calls else "ready"


class WorkerStatus(str):
    """What a worker is up to: a string, "ready", "busy" or "dead", with what its heartbeat tells.

    All attributes are None where they are not known: of a dead worker, or of one whose node does not answer.
    Of calls that run side by side, the one that has run for longest is told; `calls` has them all.

    Attributes:
        method: Name of the method that runs; None if none does.
        sequence: Which of all calls that the worker's process has begun, from 1.
        running_since: When it began, in seconds since the epoch.
        running_s: Seconds since it began.
        silent_s: Seconds since it last said that it goes on, by `current_worker().tick()` or an item of a
            stream, or since it began.
        beat_age_s: Seconds since the process's heart beat, which it does once a second in a thread.
        private_bytes: Memory of the process that is its own alone.
        device_bytes: What torch has reserved on devices, if the process uses any; as it was when a call
            ended and no other ran.
        calls: All that run, by sequence.
    """

    __slots__ = (
        "beat_age_s", "calls", "device_bytes", "method", "private_bytes", "running_s", "running_since",
        "sequence", "silent_s",
    )  # fmt: skip

    method: str | None
    sequence: int | None
    running_since: float | None
    running_s: float | None
    silent_s: float | None
    beat_age_s: float | None
    private_bytes: int | None
    device_bytes: int | None
    calls: tuple[RunningCall, ...]

    def __new__(cls, state: str, seen: Seen | None = None) -> Self:
        """The state, and what is known besides."""
        status, seen = super().__new__(cls, state), seen or Seen(is_alive=False)
        status.calls, status.beat_age_s = seen.calls, seen.beat_age_s
        first = min(seen.calls, key=lambda call: call.sequence, default=None)
        for name in ("method", "sequence", "running_s", "silent_s"):
            setattr(status, name, getattr(first, name, None))
        status.running_since = None if first is None else time.time() - first.running_s
        status.private_bytes, status.device_bytes = seen.private_bytes, seen.device_bytes
        return status

    def __repr__(self) -> str:
        names = [name for name in self.__slots__ if name not in ("calls", "running_since")]
        known = ((name, getattr(self, name)) for name in names)
        told = "".join(f", {name}={value!r}" for name, value in known if value is not None)
        return f"WorkerStatus({str(self)!r}{told})"


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """What a worker uses; None where that is not known.

    Attributes:
        cpu: Cores that it and all that it has started kept busy between the watch's last two looks, about a
            second apart; 1.0 is one busy core.
        private_bytes: Memory of its process that is its own alone, `RssAnon`; shared memory is nobody's.
        resident_bytes: All memory of its process, shared or not.
        device_bytes: What torch has reserved on devices, if the process uses any; as it was when a call
            ended and no other ran.
        n_processes: Number of processes: its own, and those that it has started.
        started_bytes: Private memory of those that it has started, an engine's processes, say.
    """

    cpu: float | None = None
    private_bytes: int | None = None
    resident_bytes: int | None = None
    device_bytes: int | None = None
    n_processes: int | None = None
    started_bytes: int | None = None

    @classmethod
    def of(cls, seen: Seen) -> Self:
        """The usage of a worker that was seen; nothing of a dead one."""
        if not seen.is_alive:
            return cls()
        sizes = (seen.private_bytes, seen.resident_bytes, seen.device_bytes)
        return cls(seen.cpu, *sizes, seen.n_processes, seen.started_bytes)


@dataclass(frozen=True, slots=True)
class StuckWorker:
    """A worker that does not go on.

    Attributes:
        rank: Its rank.
        reason: "stopped": its process is, by a signal or a debugger. "gil_held": something in it holds the
            interpreter's lock, so that no other thread gets to run. "no_progress": it has been in one call
            for longer than the threshold without a tick.
        method: Name of the method that runs; None if none does.
        sequence: Which of all calls that the worker's process has begun, from 1.
        running_s: Seconds since that call began.
        silent_s: For how long it has not gone on: since its heart beat, or since the call's last tick.
        pid: Process id on its node.
        node_id: Ray node id.
        diagnosis: Folder with what all ranks were at, where their group makes diagnoses by itself.
    """

    rank: int
    reason: StuckReason
    method: str | None
    sequence: int | None
    running_s: float | None
    silent_s: float | None
    pid: int
    node_id: str
    diagnosis: Path | None = None

    def __str__(self) -> str:
        what = _SAID[self.reason]
        where = "" if self.method is None else f" in {self.method!r} (call {self.sequence})"
        since = "" if self.silent_s is None else f" for {self.silent_s:.1f} s"
        return f"rank {self.rank} (pid {self.pid} on node {self.node_id}): {what}{where}{since}"


_SAID: Mapping[StuckReason, str] = {
    "stopped": "its process is stopped",
    "gil_held": "something holds the interpreter's lock",
    "no_progress": "no tick",
}


def why_stuck(seen: Seen, threshold_s: float) -> tuple[StuckReason, RunningCall | None, float | None] | None:
    """Why a worker is taken for stuck, with the call and for how long; None if it is not.

    A heart that beats late is believed only after two beats, whatever the threshold, and a stopped process
    is stuck after two beats, however long the threshold.
    """
    if not seen.is_alive:
        return None
    call = max(seen.calls, key=lambda each: each.silent_s, default=None)
    still_s = math.inf if seen.beat_age_s is None else seen.beat_age_s
    if seen.is_stopped and still_s > MISSED_S:
        return "stopped", call, seen.beat_age_s
    if seen.beat_age_s is not None and still_s > max(threshold_s, MISSED_S):
        return "gil_held", call, seen.beat_age_s
    if call is not None and call.silent_s > threshold_s:
        return "no_progress", call, call.silent_s
    return None


def check_threshold(threshold_s: Any) -> float:
    """A threshold that is a number above 0.

    Raises:
        TypeError: It is no number.
        ValueError: It is not above 0.
    """
    kind: Any = Real
    if isinstance(threshold_s, bool) or not isinstance(threshold_s, kind):
        raise TypeError(f"threshold_s is a number of seconds, not {threshold_s!r}")
    if not threshold_s > 0:
        raise ValueError(f"threshold_s is {threshold_s!r}; it is above 0")
    return float(threshold_s)


def checked_time(name: str, seconds: float) -> float:
    """A time that somebody gave, as every kind of wait can take it.

    Args:
        name: What it is called, for errors.
        seconds: It.

    Raises:
        TypeError: It is no number.
        ValueError: It is not finite, or below zero.
    """
    kind: Any = Real
    if isinstance(seconds, bool) or not isinstance(seconds, kind):
        raise TypeError(f"{name} is a number of seconds, not {seconds!r}")
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{name}={seconds!r} is not a finite number of seconds of at least 0")
    return float(min(seconds, LONGEST_S))


def checked_patience(timeout: float) -> float:
    """How long somebody waits for answers: a time, also one without an end.

    Raises:
        TypeError: It is no number.
        ValueError: It is `nan`, or below zero.
    """
    return checked_time("timeout", LONGEST_S if timeout == math.inf else timeout)
