"""What a diagnosis of a group says, as text and for programs; pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from raycrew.worker_groups._health.diagnosis.parts import Findings
from raycrew.worker_groups._health.reports import RankState, RunningCall, Seen
from raycrew.worker_groups.sharding import RankInfo, WorkerFacts

_VERSION = 1

#: The folder within a bundle where what recorders of collectives wrote lies, and how names of files begin.
RECORDS = "flight-recorder"
_RECORD = "rank_"


@dataclass(frozen=True, slots=True)
class RankDiagnosis:
    """One rank in a diagnosis.

    Attributes:
        rank: Its rank; -1 of a worker that stands by.
        pid: Process id on its node.
        node_id: Ray node id.
        node_address: IP address of the node.
        bundle_index: Its bundle in the group's cluster.
        device: What it computes on, as in "cuda:3".
        state: "ready", "busy", "stopped", "silent" (its heart does not beat), "alive" (its process is there,
            and what it is at can't be told), "dead", or "unanswered" (its node does not tell).
        calls: Those that it is in, or died in.
        stacks: Where its threads are.
        told_by: What told that: "py-spy" or "faulthandler".
        output: The last lines of its standard output, then those of its standard error.
        flight_record: Name of the file in the diagnosis's folder that has what the recorder of its collective
            operations wrote; empty where there is none.
        flight_record_path: Where that lies on the node.
        flight_record_is_own: Whether that is where this group's `env_vars` have it written, as the group's
            owner knows; at other places another group's rank of this number may have written it.
        missing: Why a part is not there: "state", "stacks", "output", "record".
        numbers: Seconds since its heart beat, cores, and bytes of memory that it uses, by name.
    """

    rank: int
    pid: int
    node_id: str
    node_address: str
    bundle_index: int
    device: str
    state: RankState
    calls: tuple[RunningCall, ...] = ()
    stacks: str = ""
    told_by: str = ""
    output: str = ""
    flight_record: str = ""
    flight_record_path: str = ""
    flight_record_is_own: bool = False
    missing: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, float | None] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For programs; what is not known is None or empty."""
        told = {name: getattr(self, name) for name in self.__slots__}
        calls = [{name: getattr(call, name) for name in RunningCall.__slots__} for call in self.calls]
        return {**told, "calls": calls, "missing": dict(self.missing), "numbers": dict(self.numbers)}

    @property
    def text(self) -> str:
        """For people."""
        where = f"pid {self.pid} on {self.node_address} ({self.node_id[:8]})"
        who = "standby" if self.rank < 0 else f"rank {self.rank}"
        lines = [
            f"== {who}: {self.state}{''.join(map(_in_call, self.calls))}",
            f"{where}, bundle {self.bundle_index}, {self.device}",
        ]
        if known := [
            f"{name} {_as_text(value)}" for name, value in self.numbers.items() if value is not None
        ]:
            lines.append(", ".join(known))
        if "state" in self.missing:
            lines.append(f"how it is can't be told: {self.missing['state']}")
        lines += self._part("stacks", self.stacks, f"stacks, by {self.told_by}")
        lines += self._part("output", self.output, "last lines of its output")
        lines += self._part("record", self._record(), "what the recorder of its collectives wrote")
        return "\n".join(lines)

    def _record(self) -> str:
        if not self.flight_record:
            return ""
        told = f"{self.flight_record}, from {self.flight_record_path}"
        doubt = f", which rank {self.rank} of another group on that node may have written"
        return told if self.flight_record_is_own else told + doubt

    def _part(self, part: str, text: str, head: str) -> list[str]:
        why = [f"-- no {part}, or not all: {self.missing[part]}"] if part in self.missing else []
        return [*([f"-- {head}", text] if text else []), *why]


def _as_text(number: float) -> str:
    """A number with all digits that count, in groups of three."""
    return f"{number:,}" if isinstance(number, int) else f"{number:,.10g}"


def _in_call(call: RunningCall) -> str:
    return (
        f", {call.method!r} (call {call.sequence}) for {call.running_s:.1f} s, "
        f"{call.silent_s:.1f} s since its last sign"
    )


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found out about all ranks of a group at one moment.

    Attributes:
        group_name: Name of the group.
        worker_class: Fully qualified name of its workers' class.
        generation: Which of the group's generations it is of.
        reason: Why it was made.
        made_at: When, in seconds since the epoch.
        ranks: All of them, in order.
        folder: Where it lies on this machine: `diagnosis.txt`, `diagnosis.json`, and the files of recorders.
        standbys: Workers that stand by.
    """

    group_name: str
    worker_class: str
    generation: int
    reason: str
    made_at: float
    ranks: tuple[RankDiagnosis, ...]
    folder: Path
    standbys: tuple[RankDiagnosis, ...] = ()

    @property
    def text(self) -> str:
        """For people."""
        at = datetime.fromtimestamp(self.made_at, UTC).isoformat(" ", "seconds")
        head = f"{self.group_name} ({self.worker_class}), generation {self.generation}, at {at}"
        ranks = "1 rank" if len(self.ranks) == 1 else f"{len(self.ranks)} ranks"
        lines = [head, f"reason: {self.reason}", f"{ranks}: {_states(self.ranks)}"]
        if self.standbys:
            lines.append(f"{len(self.standbys)} standing by: {_states(self.standbys)}")
        everybody = (*self.ranks, *self.standbys)
        return "\n\n".join(["\n".join(lines), *(one.text for one in everybody)]) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """For programs, of what JSON has."""
        return {
            "version": _VERSION,
            "group_name": self.group_name,
            "worker_class": self.worker_class,
            "generation": self.generation,
            "reason": self.reason,
            "made_at": self.made_at,
            "folder": str(self.folder),
            "ranks": [rank.as_dict() for rank in self.ranks],
            "standbys": [standby.as_dict() for standby in self.standbys],
        }


def _states(workers: Sequence[RankDiagnosis]) -> str:
    counted = Counter(worker.state for worker in workers)
    return ", ".join(f"{count} {state}" for state, count in counted.items())


class Who(NamedTuple):
    """Who a rank is, and where; see `RankDiagnosis`."""

    rank: int
    pid: int
    node_id: str
    node_address: str
    bundle_index: int
    device: str


def who_is(info: RankInfo, facts: WorkerFacts) -> Who:
    """Who a rank is, from what its group knows of it."""
    return _who(info.rank, info.bundle_index, facts)


def who_stands_by(bundle_index: int, facts: WorkerFacts) -> Who:
    """Who a worker without a rank is."""
    return _who(-1, bundle_index, facts)


def _who(rank: int, bundle_index: int, facts: WorkerFacts) -> Who:
    kind, index = facts.device_kind, facts.device_index
    device = kind if index is None else f"{kind}:{index}"
    return Who(rank, facts.pid, facts.node_id, facts.node_address, bundle_index, device)


def diagnosed(who: Who, found: Findings, prefixes: Sequence[str] = ()) -> RankDiagnosis:
    """One rank, from who it is, what was found of it, and where its recorder was told to write."""
    seen = found.seen
    return RankDiagnosis(
        *who,
        state="unanswered" if seen is None else seen.state,
        calls=() if seen is None else seen.calls,
        stacks=found.stacks,
        told_by=found.told_by,
        output=found.output,
        flight_record=f"{RECORDS}/{_RECORD}{who.rank}" if found.record else "",
        flight_record_path=found.record_path if found.record else "",
        flight_record_is_own=found.record_path in [f"{prefix}{who.rank}" for prefix in prefixes],
        missing=found.missing,
        numbers={} if seen is None else _numbers(seen),
    )


def _numbers(seen: Seen) -> dict[str, float | None]:
    names = (
        "beat_age_s", "cpu", "private_bytes", "resident_bytes", "device_bytes", "n_processes",
        "ended_at_bytes",
    )  # fmt: skip
    return {name: getattr(seen, name) for name in names}
