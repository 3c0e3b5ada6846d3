"""What publishers and receivers say to a directory of versions, and what it knows of each version."""

from dataclasses import dataclass, field
from typing import Any, Literal

from raycrew.tensor_transport._bytes import ByFields
from raycrew.tensor_transport.weights._directory.ballots import Ballots
from raycrew.tensor_transport.weights._update import (
    Bucket,
    BucketPlan,
    Span,
    TensorEntry,
    WeightUpdate,
    sealed,
)

State = Literal["open", "complete", "committed", "aborted"]
SMALL_BYTES = 64 << 20
"""One bucket of at most this size is put, and got, without a message for either."""


@dataclass(frozen=True, slots=True)
class Begin:
    """What a publisher says before its first bucket.

    Attributes:
        part: Which part of the version it publishes.
        parts: How many there are.
        publisher: Its incarnation.
        scope: Who can release its buckets: all that have the same one; "" where nobody has to.
        version: The number that it wants, None for the next.
        digest: Of the plan; empty where that is not known before the tensors are.
        plan: Left out where the directory knows it by its digest.
        names: What a partial update changes; None where it is all of the part.
    """

    part: int
    parts: int
    publisher: str
    scope: str
    version: int | None
    digest: str
    plan: BucketPlan | None
    names: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class Begun(ByFields):
    """What a publisher is told when it begins.

    Attributes:
        number: Of the version.
        route: The key of the route over which its recipients take it while it is put; "" where they do not.
        left_s: Within how many seconds it has to be decided; None where it has no deadline.
        is_unconfirmed: Whether it counts only once who asked for it says that it was published.
        freed: Tickets to release.
    """

    number: int
    route: str
    left_s: float | None
    is_unconfirmed: bool
    freed: tuple[Any, ...]


def check_named(part: int, parts: int) -> None:
    """Refuse a part that nobody asked for, and that does not say of which version it is.

    Raises:
        ValueError: There are others, which may be those of another training step.
    """
    if parts > 1:
        raise ValueError(
            f"part {part} of {parts} could be joined to parts of another training step, as no sync_weights() "
            "with a directory asks for it: give version=, the same number on all ranks, for example the "
            "training step, counted from 1"
        )


@dataclass(frozen=True, slots=True)
class Finish:
    """What a publisher says after its last bucket; `plan` where there was none before.

    `rest` are buckets that were not announced before.
    """

    part: int
    publisher: str
    bucket_count: int
    plan: BucketPlan | None
    gather_s: float
    put_s: float
    spans: tuple[Span, ...]
    rest: "tuple[Announced, ...]" = ()


@dataclass(frozen=True, slots=True)
class Announced(ByFields):
    """A bucket that can be fetched; `entries` where there was no plan before; `place` among all parts'."""

    part: int
    index: int
    bucket: Bucket
    entries: tuple[TensorEntry, ...] | None
    place: int = 0


@dataclass(frozen=True, slots=True)
class Offer:
    """What there is of a version before its buckets.

    A plan is None where the receiver knows its digest already, or where entries come with the buckets (the
    digest is empty then). `news` are buckets that can be fetched already, for who reads on at once.
    """

    version: int
    publisher: str
    plans: tuple[BucketPlan | None, ...]
    digests: tuple[str, ...]
    bases: frozenset[int] | None
    is_vote: bool
    news: "News | None" = None


@dataclass(frozen=True, slots=True)
class News:
    """Buckets that a receiver has not seen.

    `done` says that there will be no more, and `counts` that they count as had: nobody need say so. For
    `quiet_s` seconds nobody waits to hear which of them are had.
    """

    buckets: tuple[Announced, ...]
    done: bool
    counts: bool = False
    quiet_s: float = 0.0


@dataclass
class Part:
    """What one publishing rank has published of a version."""

    begin: Begin
    expires: float
    plan: BucketPlan | None
    finish: Finish | None = None
    buckets: list[Announced] = field(default_factory=list)


@dataclass
class Version:
    """One version, from its first word to its last.

    Attributes:
        begun: Parts that began it, or were told that it is over.
        readers: Receivers that were told what there is of it.
        outdated: Those that read nothing before they are told so anew: they gave it up, or were told of what
            was given up under its number.
        route: The key of the route over which its recipients take it while it is put.
        announced: How many buckets were announced.
        patient: Receivers that do nothing with a bucket before all of them are there.
        is_metered: Whether a publisher asks for room for what it puts.
        is_hurried: Whether it waited for receivers to have what was put.
    """

    number: int
    ballots: Ballots | None = None
    deadline: float | None = None
    state: State = "open"
    reason: str = ""
    parts: dict[int, Part] = field(default_factory=dict)
    bases: frozenset[int] | None = None
    votes: dict[str, bool] = field(default_factory=dict)
    taken: dict[str, tuple[int, ...]] = field(default_factory=dict)
    fetching: dict[str, float] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    readers: set[str] = field(default_factory=set)
    outdated: set[str] = field(default_factory=set)
    is_called_for: bool = True
    route: str = ""
    announced: int = 0
    patient: set[str] = field(default_factory=set)
    is_metered: bool = False
    is_hurried: bool = False

    def refuses(self, part: int) -> bool:
        """Whether who publishes a part was asked for this version, and was not told yet that it is over."""
        called = self.ballots is not None and self.is_called_for
        return called and self.state == "aborted" and part not in self.begun

    def has(self, part: int, publisher: str) -> bool:
        """Whether a part was begun by this publisher."""
        return part in self.parts and self.parts[part].begin.publisher == publisher

    @property
    def is_live(self) -> bool:
        """Whether nothing is decided."""
        return self.state in ("open", "complete")

    @property
    def is_unconfirmed(self) -> bool:
        """Whether who asked for it does not know yet that it was published."""
        return self.ballots is not None and not self.ballots.is_confirmed

    @property
    def is_chosen(self) -> bool:
        """Whether all that have to say so want it."""
        if self.ballots is None:
            return True
        return self.ballots.is_confirmed and all(self.votes.get(r) for r in self.ballots.receivers)

    def is_taken(self, announced: Announced) -> bool:
        """Whether all recipients have a bucket."""
        return self.ballots is None or all(self.has_taken(r, announced) for r in self.ballots.receivers)

    def is_voter(self, receiver: str) -> bool:
        """Whether a receiver counts: all do, where it was made for nobody alone."""
        return self.ballots is None or receiver in self.ballots.receivers

    def waits(self, receiver: str) -> bool:
        """Whether a receiver is told nothing before all buckets are there."""
        return receiver in self.patient and not self.is_hurried

    @property
    def is_read_by_all(self) -> bool:
        """Whether all recipients have begun to read it."""
        return self.ballots is not None and all(r in self.taken for r in self.ballots.receivers)

    @property
    def is_awaited_whole(self) -> bool:
        """Whether nobody reads it who wants to hear of a bucket before all are there."""
        return self.ballots is not None and all(map(self.waits, self.ballots.receivers))

    @property
    def expected(self) -> int:
        """How many parts it has."""
        return next(iter(self.parts.values())).begin.parts if self.parts else 1

    @property
    def is_begun(self) -> bool:
        """Whether all its parts are."""
        return bool(self.parts) and len(self.parts) >= self.expected

    @property
    def awaited(self) -> dict[int, Part]:
        """The parts whose lease counts: of who publishes, or has others begin who were asked by nobody."""
        joining = self.ballots is None and not self.is_begun
        return {i: part for i, part in self.parts.items() if joining or part.finish is None}

    @property
    def buckets(self) -> list[Announced]:
        """All buckets so far, in the order of their parts."""
        return [bucket for part in self.parts.values() for bucket in part.buckets]

    @property
    def names(self) -> dict[int, frozenset[str] | None]:
        """What each part changes; None where it is all of the part."""
        return {number: part.begin.names for number, part in self.parts.items()}

    def has_taken(self, receiver: str, announced: Announced) -> bool:
        """Whether a receiver has a bucket."""
        seen = self.taken.get(receiver, ())
        return announced.part < len(seen) and seen[announced.part] > announced.index

    def forget(self, receiver: str) -> None:
        """A receiver is gone, or has what it wanted."""
        self.fetching.pop(receiver, None)
        self.patient.discard(receiver)
        self.nodes = {node: r for node, r in self.nodes.items() if r != receiver}

    @property
    def size_bytes(self) -> int:
        """Bytes so far."""
        return sum(announced.bucket.size_bytes for announced in self.buckets)

    def update_of(self, part: Part) -> WeightUpdate:
        """One part, as its publisher made it."""
        plan = part.plan or BucketPlan((), ())
        finish = part.finish
        return sealed(
            WeightUpdate(
                publisher=part.begin.publisher,
                version=self.number,
                tensors=plan.tensors,
                buckets=tuple(announced.bucket for announced in part.buckets),
                gather_s=finish.gather_s if finish else 0.0,
                put_s=finish.put_s if finish else 0.0,
                part=part.begin.part,
                parts=part.begin.parts,
                bases=self.bases,
                spans=finish.spans if finish else (),
            ),
            plan,
        )


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """One version, as a directory knows it.

    Attributes:
        version: Its number.
        state: "open" (being published), "complete", "committed" or "aborted".
        size_bytes: Bytes that its publishers put for it.
        holders: Receivers that hold it.
        reason: Why it was aborted.
    """

    version: int
    state: State
    size_bytes: int
    holders: tuple[str, ...]
    reason: str = ""
