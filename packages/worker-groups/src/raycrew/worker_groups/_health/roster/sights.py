"""What is seen of the ranks of a group, joined from its record, Ray's word and its nodes' watches; pure."""

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from raycrew.worker_groups._health.reports import RankState, Seen
from raycrew.worker_groups._health.roster.records import GroupRecord, WorkerRecord

#: Node, process id and start: one process of the whole cluster.
ProcessKey = tuple[str, int, int]

#: "starting": of a group that does not stand yet.
State = RankState | Literal["starting"]

STATES: tuple[State, ...] = ("starting", "ready", "busy", "stopped", "silent", "alive", "dead", "unanswered")


@dataclass(frozen=True, slots=True)
class RankSight:
    """One rank as it is seen.

    Attributes:
        worker: Who it is.
        state: What it is up to.
        seen: What its node's watch tells of it.
        note: Why that is not known, where it is not.
    """

    worker: WorkerRecord
    state: State
    seen: Seen | None = None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For programs; what is not known is None."""
        seen = self.seen or Seen(is_alive=False)
        call = min(seen.calls, key=lambda each: each.sequence, default=None)
        return {
            **asdict(self.worker),
            "state": self.state,
            "note": self.note,
            "method": None if call is None else call.method,
            "running_s": None if call is None else call.running_s,
            "silent_s": None if call is None else call.silent_s,
            "cpu": seen.cpu,
            "private_bytes": seen.private_bytes,
            "resident_bytes": seen.resident_bytes,
            "device_bytes": seen.device_bytes,
            "n_processes": seen.n_processes,
        }


@dataclass(frozen=True, slots=True)
class GroupSight:
    """One group as it is seen.

    Attributes:
        record: What it tells of itself.
        ranks: In rank order, as far as it is known who they are.
        note: How far its start or renewal has got; empty for a group that stands.
        standbys: Workers that stand by, which have no rank.
    """

    record: GroupRecord
    ranks: tuple[RankSight, ...]
    note: str = ""
    standbys: tuple[RankSight, ...] = ()

    @property
    def n_ranks(self) -> int:
        """How many ranks it has, or is to have."""
        start = self.record.start
        return len(self.ranks) if start is None else max(len(self.ranks), start.n_ranks)

    @property
    def counts(self) -> dict[State, int]:
        """How many ranks are in each state that any is in."""
        counted: Counter[State] = Counter(rank.state for rank in self.ranks)
        counted["starting"] += self.n_ranks - len(self.ranks)
        return {state: counted[state] for state in STATES if counted[state]}

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        record = self.record
        return {
            "name": record.name,
            "worker_class": record.worker_class,
            "namespace": record.namespace,
            "driver": record.driver,
            "generation": record.generation,
            "note": self.note,
            "states": dict(self.counts),
            "workers": [rank.as_dict() for rank in self.ranks],
            "standbys": [standby.as_dict() for standby in self.standbys],
        }


@dataclass(frozen=True, slots=True)
class Stacks:
    """The stacks of one rank.

    Attributes:
        record: What its group tells of itself.
        worker: Who it is.
        text: The stacks of all its threads; empty where there are none.
        told_by: Which program told them.
        note: Why there are none.
    """

    record: GroupRecord
    worker: WorkerRecord
    text: str = ""
    told_by: str = ""
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        told = {"text": self.text, "told_by": self.told_by, "note": self.note}
        group = self.record
        whose = {"group": group.name, "namespace": group.namespace, "driver": group.driver}
        return {**whose, **asdict(self.worker), **told}


def key_of(worker: WorkerRecord) -> ProcessKey:
    """Which process a rank is."""
    return worker.node_id, worker.pid, worker.started


def group_sight(
    record: GroupRecord,
    living: Set[tuple[str, str]],
    reports: Mapping[ProcessKey, Seen | str],
    silent: Mapping[str, str],
    now: float,
) -> GroupSight:
    """A group as it is seen.

    Args:
        record: What it tells of itself.
        living: Namespaces and names of all actors that live.
        reports: What watches tell of each process, or why they can't.
        silent: By node, why no watch there has told anything.
        now: Seconds since the epoch.
    """
    start = record.start
    waits: tuple[State, ...] = () if start is None else ("dead",) if start.is_renewal else ("ready", "alive")

    def sight(worker: WorkerRecord) -> RankSight:
        told = reports.get(key_of(worker))
        if isinstance(told, Seen):
            return RankSight(worker, told.state, told)
        if (record.namespace, worker.actor) not in living:
            return RankSight(worker, "dead")
        note = told or silent.get(worker.node_id, "no watch on its node knows it")
        return RankSight(worker, "unanswered", note=note)

    found, standbys = map(sight, record.workers), tuple(map(sight, record.standbys))
    ranks = tuple(replace(rank, state="starting") if rank.state in waits else rank for rank in found)
    return GroupSight(record, ranks, "" if start is None else start.note(now), standbys)
