"""What a group tells everybody of itself, as JSON: who its ranks are and where, and no secrets; pure."""

import json
from collections.abc import Iterable, Set
from dataclasses import asdict, dataclass, fields
from typing import Any

_VERSION = 1


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One rank.

    Attributes:
        rank: Its rank; -1 of a worker that stands by.
        actor: Name of its actor.
        node_id: Ray node id.
        node_address: IP address of the node.
        pid: Process id on the node.
        started: When the process was started, in clock ticks since the node's boot.
        bundle_index: Its bundle in the group's cluster.
        device: What it computes on, as in "cuda:3".
        tied_group: Its tied group, where ranks are tied.
        placement_group: Ray's id of the placement group that it is in; empty where it is in none.
        placement_bundle: Its bundle's place in that.
    """

    rank: int
    actor: str
    node_id: str
    node_address: str
    pid: int
    started: int
    bundle_index: int
    device: str = "cpu"
    tied_group: int | None = None
    placement_group: str = ""
    placement_bundle: int = 0


@dataclass(frozen=True, slots=True)
class StartRecord:
    """How far the start of a group has got, or the renewal of one that stands.

    Attributes:
        step: What is waited for.
        began: When the start began, in seconds since the epoch.
        until: When it has ended by its own deadline, however it ended; the same.
        n_ranks: How many ranks the group is to have.
        n_answered: How many of them have done the step.
        missing: Names of some that have not.
        job: The job of the driver, as Ray names it.
        doing: What is done to the group.
    """

    step: str
    began: float
    until: float
    n_ranks: int
    n_answered: int
    missing: str
    job: str
    doing: str = "starting"

    @property
    def is_renewal(self) -> bool:
        """Whether the group stands already, and those of its ranks that live go on."""
        return self.doing != "starting"

    def note(self, now: float) -> str:
        """How far it has got, in words.

        Args:
            now: Seconds since the epoch.
        """
        said = f"{self.doing} for {max(0.0, now - self.began):.0f} s: {self.step}"
        if self.n_answered == self.n_ranks or not self.missing:
            return said
        return f"{said}, {self.n_answered} of {self.n_ranks} ranks are done, not {self.missing}"

    def is_over(self, now: float, living_jobs: Set[str] | None) -> bool:
        """Whether it has ended, though nobody has said so: its driver was killed, say.

        Args:
            now: Seconds since the epoch.
            living_jobs: All jobs whose drivers live; None where that is not known.
        """
        return now > self.until or (living_jobs is not None and self.job not in living_jobs)


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One group in one generation.

    Attributes:
        name: Name of the group.
        worker_class: Fully qualified name of its workers' class.
        namespace: The namespace that names of its actors are in.
        owner: Whose watches know its workers.
        generation: Grows with every restart.
        workers: In rank order.
        driver: Host and process id of its driver, as in "login-1:4711".
        start: How far its start has got; None for a group that stands.
        standbys: Workers that stand by.
    """

    name: str
    worker_class: str
    namespace: str
    owner: str
    generation: int
    workers: tuple[WorkerRecord, ...]
    driver: str = ""
    start: StartRecord | None = None
    standbys: tuple[WorkerRecord, ...] = ()

    @property
    def processes(self) -> tuple[WorkerRecord, ...]:
        """All its workers, those that stand by last."""
        return (*self.workers, *self.standbys)

    def is_meant_by(self, name: str) -> bool:
        """Whether it is chosen by this: its name, or "name@driver" where several bear that."""
        return name in (self.name, f"{self.name}@{self.driver}")

    def as_text(self) -> str:
        """As it is left to be read."""
        return json.dumps({"version": _VERSION, **asdict(self)})

    def is_left_over(self, living: Set[tuple[str, str]], watch: str) -> bool:
        """Whether no actor lives of this group: its driver was killed, say, and its actors with it.

        One that is starting may not have any yet.

        Args:
            living: Namespaces and names of all actors that live.
            watch: How names of its owner's watches begin.
        """
        if any((self.namespace, worker.actor) in living for worker in self.workers):
            return False
        return not any(name.startswith(watch) for _, name in living)


def record_of(text: str) -> GroupRecord | None:
    """The record that a text is of; None if it is none, or one of another version of this package."""
    try:
        entry = json.loads(text)
        if entry.pop("version") != _VERSION:
            return None
        workers = _workers(entry.pop("workers"))
        standbys = _workers(entry.pop("standbys", ()))
        start = entry.pop("start", None)
        begun = None if start is None else StartRecord(**_known(StartRecord, start))
        return GroupRecord(**_known(GroupRecord, entry), workers=workers, start=begun, standbys=standbys)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _workers(entries: Iterable[dict[str, Any]]) -> tuple[WorkerRecord, ...]:
    return tuple(WorkerRecord(**_known(WorkerRecord, worker)) for worker in entries)


def _known(kind: type, entry: dict[str, Any]) -> dict[str, Any]:
    """What a record has of the fields of a kind, each of its type: anybody may leave a record."""
    types: dict[str, Any] = {field.name: field.type for field in fields(kind)}
    known = {name: value for name, value in entry.items() if name in types}
    for name, value in known.items():
        if not isinstance(value, types[name]):
            raise TypeError(f"{name} is a {type(value).__name__}")
    return known
