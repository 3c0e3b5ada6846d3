"""What a directory of versions knows, and what it decides: a state machine without clock, threads or Ray.

Every method takes the time. What returns None is not possible yet: ask again after a change.
"""

from collections.abc import Sequence
from typing import Any, Literal

from raycrew.tensor_transport.errors import (
    BucketFetchError,
    StaleVersionError,
    UpdateAbortedError,
    WeightUpdateError,
)
from raycrew.tensor_transport.weights._lineage import Lineage
from raycrew.tensor_transport.weights._manifest import (
    Bucket,
    BucketPlan,
    WeightUpdate,
    join_updates,
    joined_name,
)
from raycrew.tensor_transport.weights._relay import choose_fanout, relay_parent
from raycrew.tensor_transport.weights._versions import (
    Announced,
    Begin,
    Finish,
    News,
    Offer,
    Part,
    State,
    Version,
    VersionStatus,
)


class Record:
    """The record of one publisher group.

    Args:
        keep: How many committed versions stay available.
        lease_s: How long a publisher, or a receiver that fetches, may be silent before it counts as dead.
        fanout: How many nodes fetch from one; None where all fetch from the publishers' nodes, "auto" for
            what is earliest done.
    """

    def __init__(
        self, keep: int = 1, lease_s: float = 60.0, fanout: int | Literal["auto"] | None = "auto"
    ) -> None:
        self.keep = keep
        self.lease_s = lease_s
        self.fanout = fanout
        self.versions: dict[int, Version] = {}
        self.holders: dict[str, int] = {}
        self._publishers: dict[int, str] = {}
        self._last = 0
        self._freed: dict[str, list[Any]] = {}
        self._plans: dict[str, BucketPlan] = {}
        self._digests: dict[int, str] = {}
        self._lineage = Lineage()

    # What publishers say.

    def enroll(self, now: float, part: int, publisher: str) -> bool:
        """A publisher starts; whoever published this part before is replaced."""
        before = self._publishers.get(part)
        self._publishers[part] = publisher
        for version in self._live():
            if before is not None and before != publisher and part in version.parts:
                self._abort(version, f"the publisher of part {part} was replaced")
        return self._tidy(now)

    def reserve(self, now: float, voters: int, deadline_s: float | None) -> int:
        """The number of a version that commits when `voters` receivers have loaded it, and aborts else."""
        self._tidy(now)
        for version in self._live():
            self._abort(version, "another update was begun")
        deadline = None if deadline_s is None else now + deadline_s
        return self._open(voters, deadline).number

    def begin(self, now: float, begin: Begin) -> int | None:
        """A publisher begins its part of a version; which one.

        Raises:
            StaleVersionError: The publisher was replaced, or the version is not above the last one.
        """
        self._tidy(now)
        self._check_publisher(begin.part, begin.publisher)
        if begin.names is not None and not self._lineage.bases({begin.part: begin.names}):
            raise ValueError("there is no version that a partial update could be added to")
        self._remember(begin)
        version = self._version_for(begin)
        if version is None:
            return None
        plan = self._plans.get(begin.digest)
        version.parts[begin.part] = Part(begin, now + self.lease_s, plan)
        if len(version.parts) == begin.parts:
            version.bases = self._lineage.bases(version.names)
        return version.number

    def credit(self, now: float, number: int, part: int, size_bytes: int, window_bytes: int) -> bool | None:
        """Whether so many bytes more may be put: what is ahead of the slowest voter has to fit the window."""
        if number in self.versions and part in self.versions[number].parts:
            self.versions[number].parts[part].expires = now + self.lease_s
        version = self._living(now, number)
        ahead = [a for a in version.parts[part].buckets if not self._is_taken(version, a)]
        if not ahead or sum(a.bucket.size_bytes for a in ahead) + size_bytes <= window_bytes:
            return True
        return None

    def announce(self, now: float, number: int, publisher: str, announced: Announced) -> None:
        """A bucket can be fetched."""
        version = self._living(now, number)
        self._check_publisher(announced.part, publisher)
        part = version.parts[announced.part]
        part.buckets.append(announced)
        part.expires = now + self.lease_s

    def finish(self, now: float, number: int, finish: Finish) -> WeightUpdate:
        """A part is complete; what it is now."""
        version = self._living(now, number)
        self._check_publisher(finish.part, finish.publisher)
        part = version.parts[finish.part]
        if len(part.buckets) != finish.bucket_count:
            raise WeightUpdateError(
                f"version {number}: {len(part.buckets)} of {finish.bucket_count} buckets were announced"
            )
        part.finish, part.plan = finish, part.plan or finish.plan
        update = version.update_of(part)
        if sum(part.finish is not None for part in version.parts.values()) == version.expected:
            version.state = "complete"
            self._decide(version)
            self._tidy(now)
        return update

    def abort(self, now: float, number: int, reason: str) -> bool:
        """Give a version up, unless it is decided; whether it is aborted."""
        self._tidy(now)
        version = self.versions.get(number)
        if version is not None and version.is_live:
            self._abort(version, reason)
        return version is None or version.state == "aborted"

    def retire(self, now: float, part: int, publisher: str) -> bool:
        """A publisher is closed: what it published is given up."""
        if self._publishers.get(part) != publisher:
            return False
        for version in self.versions.values():
            if part in version.parts:
                if version.is_live:
                    self._abort(version, f"the publisher of part {part} was closed")
                self._drop(version)
        return self._tidy(now)

    def collect(self, now: float, node: str) -> list[Any]:
        """Tickets of buckets that nobody needs any more, put on this node; told once."""
        self._tidy(now)
        return self._freed.pop(node, [])

    # What receivers say.

    def offer(self, now: float, number: int, known: frozenset[str] = frozenset()) -> Offer | None:
        """What a version has, once all its publishers have begun; without plans whose digest is known.

        Raises:
            UpdateAbortedError: It was given up.
            BucketFetchError: It is not kept any more.
        """
        self._tidy(now)
        version = self.versions.get(number)
        if version is None and number > self._last:
            return None
        version = self._readable(number)
        if not version.parts or len(version.parts) < version.expected:
            return None
        begins = [version.parts[i].begin for i in sorted(version.parts)]
        return Offer(
            number,
            joined_name([begin.publisher for begin in begins]),
            tuple(None if b.digest in known else self._plans.get(b.digest) for b in begins),
            tuple(begin.digest for begin in begins),
            version.bases,
            version.voters is not None and version.state != "committed",
        )

    def news(self, now: float, number: int, receiver: str, node: str, seen: Sequence[int]) -> News | None:
        """Buckets of a version that a receiver has not seen, `seen` of each part."""
        if number in self.versions:
            self.versions[number].fetching[receiver] = now + self.lease_s
        self._tidy(now)
        version = self._readable(number)
        version.nodes.setdefault(node, receiver)
        self._note_taken(version, receiver, seen)
        fresh = [
            announced
            for index, part in sorted(version.parts.items())
            for announced in part.buckets[seen[index] :]
            if self._relayed(version, node, announced)
        ]
        total = len(version.buckets)
        done = version.state != "open" and sum(seen) + len(fresh) == total
        if not fresh and not done:
            return None
        return News(tuple(fresh), done)

    def took(self, now: float, number: int, receiver: str, seen: Sequence[int]) -> None:
        """A receiver has so many buckets of each part."""
        self._tidy(now)
        version = self._readable(number)
        version.fetching[receiver] = now + self.lease_s
        if version.state != "open" and sum(seen) == len(version.buckets):
            version.fetching.pop(receiver)
        self._note_taken(version, receiver, seen)

    def vote(self, now: float, number: int, receiver: str, loaded: bool, reason: str) -> None:
        """A receiver has loaded a version, or cannot."""
        self._tidy(now)
        version = self.versions.get(number)
        if version is None or not version.is_live:
            return
        version.votes[receiver] = loaded
        version.fetching.pop(receiver, None)
        if not loaded and version.voters is not None:
            self._abort(version, f"receiver {receiver}: {reason}")
        self._decide(version)

    def decision(self, now: float, number: int) -> State | None:
        """Whether a version is committed or aborted; what is not known any more is aborted."""
        self._tidy(now)
        version = self.versions.get(number)
        if version is None:
            return "aborted"
        return None if version.is_live else version.state

    def reason(self, now: float, number: int) -> str:
        """Why a version was aborted."""
        self._tidy(now)
        version = self.versions.get(number)
        return "it is not known any more" if version is None else version.reason

    def hold(self, now: float, receiver: str, number: int) -> None:
        """A receiver holds a version, and reads no other one."""
        self.holders[receiver] = number
        for version in self.versions.values():
            version.fetching.pop(receiver, None)
        self._tidy(now)

    def leave(self, now: float, receiver: str) -> None:
        """A receiver is gone."""
        self.holders.pop(receiver, None)
        for version in self.versions.values():
            took_part = receiver in version.taken or receiver in version.votes
            version.forget(receiver)
            if version.is_live and version.voters is not None and took_part:
                self._abort(version, f"receiver {receiver} left")
        self._tidy(now)

    def chain(self, now: float, target: int | None, held: int | None) -> list[int]:
        """The versions to apply one after another to have a version (the latest: None) from what is held.

        Raises:
            BucketFetchError: It is not kept.
        """
        self._tidy(now)
        number = self.newest(now) if target is None else target
        if number is None:
            raise BucketFetchError(
                "no version is kept" if self._last else "no version was published yet", version=0
            )
        found: list[int] = []
        while number != held:
            version = self._readable(number)
            found.append(number)
            if version.bases is None or held in version.bases:
                break
            number = min(version.bases, default=0)
        return found[::-1]

    def update(self, now: float, number: int) -> WeightUpdate:
        """All parts of a version that is complete."""
        self._tidy(now)
        version = self._readable(number)
        if version.state == "open":
            raise WeightUpdateError(f"version {number} is not complete", version=number)
        return join_updates([version.update_of(part) for part in version.parts.values()])

    def newest(self, now: float) -> int | None:
        """The last committed version that is kept."""
        self._tidy(now)
        kept = [n for n, v in self.versions.items() if v.state == "committed" and v.parts]
        return max(kept, default=None)

    def status(self, now: float) -> tuple[VersionStatus, ...]:
        """All versions that are live, kept, or were aborted lately."""
        self._tidy(now)
        return tuple(
            VersionStatus(
                v.number,
                v.state,
                v.size_bytes,
                tuple(sorted(r for r, held in self.holders.items() if held == v.number)),
                v.reason,
            )
            for v in self.versions.values()
        )

    def next_expiry(self) -> float | None:
        """When something ends if nobody says anything before."""
        times: list[float] = []
        for version in self.versions.values():
            times += version.fetching.values()
            if version.is_live:
                times += [part.expires for part in version.parts.values() if part.finish is None]
                times += [] if version.deadline is None else [version.deadline]
        return min(times, default=None)

    # What follows from it.

    def _live(self) -> list[Version]:
        return [version for version in self.versions.values() if version.is_live]

    def _open(self, voters: int | None = None, deadline: float | None = None) -> Version:
        self._last += 1
        version = self.versions[self._last] = Version(self._last, voters, deadline)
        return version

    def _version_for(self, begin: Begin) -> Version | None:
        for version in self._live():
            if version.state == "open" and begin.part not in version.parts:
                return self._joined(version, begin)
            if version.state == "open" and version.parts[begin.part].finish is None:
                self._abort(version, f"part {begin.part} was begun again")
            else:
                return None  # Others are not done with it.
        stored = [v for v in self.versions.values() if v.parts and v.state == "committed"]
        if len(stored) > max(self.keep, len(self._needed())):
            return None  # A receiver still reads what is to make room.
        if self.keep == 0:
            raise WeightUpdateError("a directory with keep=0 takes updates from sync_weights() alone")
        if begin.version is not None and begin.version <= self._last:
            raise StaleVersionError(
                f"the last version is {self._last}: {begin.version} is not above it", version=begin.version
            )
        self._last = self._last if begin.version is None else begin.version - 1
        return self._open()

    def _joined(self, version: Version, begin: Begin) -> Version:
        """An open version, if this part fits it."""
        if begin.version not in (None, version.number):
            raise StaleVersionError(
                f"version {version.number} is being published, not {begin.version}",
                version=begin.version or 0,
            )
        if version.parts and begin.parts != version.expected:
            raise WeightUpdateError(
                f"version {version.number} has {version.expected} parts, not {begin.parts}: all ranks of the "
                "trainer name the same number"
            )
        return version

    def _check_publisher(self, part: int, publisher: str) -> None:
        current = self._publishers.get(part)
        if current != publisher:
            raise StaleVersionError(
                f"publisher {publisher:.8} of part {part} was replaced by {current or 'nobody':.8}: only the "
                "one that was made last may publish"
            )

    def _living(self, now: float, number: int) -> Version:
        self._tidy(now)
        version = self.versions.get(number)
        if version is None or version.state != "open":
            reason = "it is over" if version is None else version.reason or f"it is {version.state}"
            raise UpdateAbortedError(f"version {number} was given up: {reason}", version=number)
        return version

    def _readable(self, number: int) -> Version:
        version = self.versions.get(number)
        if version is not None and version.state == "aborted":
            raise UpdateAbortedError(f"version {number} was given up: {version.reason}", version=number)
        if version is None or (version.state == "committed" and not version.parts):
            kept = [n for n, v in self.versions.items() if v.state == "committed" and v.parts]
            raise BucketFetchError(
                f"version {number} is not kept (keep={self.keep}); there are {kept}", version=number
            )
        return version

    def _relayed(self, version: Version, node: str, announced: Announced) -> bool:
        """Whether a node may fetch a bucket: its parent in the relay has it."""
        fanout = self.fanout
        if fanout == "auto":
            sizes = [part.plan.bucket_sizes for part in version.parts.values() if part.plan is not None]
            fanout = choose_fanout(len(version.nodes), max(1, sum(map(len, sizes))))
        parent = relay_parent(list(version.nodes), node, fanout)
        if parent is None:
            return True
        return version.has_taken(version.nodes[parent], announced)

    def _is_taken(self, version: Version, announced: Announced) -> bool:
        """Whether all voters have a bucket."""
        takers = sum(version.has_taken(receiver, announced) for receiver in version.taken)
        return version.voters is None or takers >= version.voters

    def _note_taken(self, version: Version, receiver: str, seen: Sequence[int]) -> None:
        version.taken[receiver] = tuple(seen)
        if self.keep:
            return
        for part in version.parts.values():
            for i, announced in enumerate(part.buckets):
                if announced.bucket.ticket is not None and self._is_taken(version, announced):
                    self._free(part.begin.node, announced)
                    emptied = Bucket(None, announced.bucket.size_bytes, announced.bucket.checksum)
                    part.buckets[i] = Announced(part.begin.part, announced.index, emptied, announced.entries)

    def _decide(self, version: Version) -> None:
        if version.state != "complete":
            return
        ready = sum(version.votes.values())
        if version.voters is None or ready >= version.voters:
            version.state = "committed"
            self._lineage.note(version.number, version.names)
            for receiver, loaded in version.votes.items():
                if loaded:
                    self.holders[receiver] = version.number

    def _abort(self, version: Version, reason: str) -> None:
        version.state, version.reason = "aborted", reason
        self._drop(version)

    def _drop(self, version: Version) -> None:
        for part in version.parts.values():
            for announced in part.buckets:
                self._free(part.begin.node, announced)
        version.parts = {}

    def _free(self, node: str, announced: Announced) -> None:
        if announced.bucket.ticket is not None:
            self._freed.setdefault(node, []).append(announced.bucket.ticket)

    def _tidy(self, now: float) -> bool:
        """End what is over: leases, deadlines, versions that nobody needs."""
        for version in list(self.versions.values()):
            silent = [r for r, until in version.fetching.items() if until <= now]
            for receiver in silent:
                version.forget(receiver)
                self.holders.pop(receiver, None)
            if not version.is_live:
                continue
            late = [i for i, p in version.parts.items() if p.finish is None and p.expires <= now]
            if late:
                self._abort(version, f"the publishers of parts {late} are silent since {self.lease_s:g} s")
            elif silent and version.voters is not None:
                self._abort(version, f"receivers {silent} are silent since {self.lease_s:g} s")
            elif version.deadline is not None and version.deadline <= now:
                self._abort(version, "not all receivers had loaded it by its deadline")
        needed = self._needed()
        for number, version in self.versions.items():
            if version.state == "committed" and number not in needed and not version.fetching:
                self._drop(version)
        self._forget()
        return True

    def _needed(self) -> set[int]:
        """The versions to keep: the last ones, and those that they have to be added to."""
        committed = sorted(n for n, v in self.versions.items() if v.state == "committed")
        needed = set(committed[len(committed) - self.keep :])
        for number in sorted(needed, reverse=True):
            bases = self.versions[number].bases
            while bases:
                base = min(bases)
                needed.add(base)
                bases = self.versions[base].bases if base in self.versions else None
        return needed

    def _remember(self, begin: Begin) -> None:
        """Know a plan as long as a version has it, or its publisher may have it again."""
        if begin.plan is not None:
            self._plans[begin.digest] = begin.plan
        self._digests[begin.part] = begin.digest
        used = {part.begin.digest for version in self.versions.values() for part in version.parts.values()}
        used |= set(self._digests.values())
        self._plans = {digest: plan for digest, plan in self._plans.items() if digest in used}

    def _forget(self, limit: int = 100) -> None:
        over = [n for n, v in self.versions.items() if not v.is_live and not v.parts]
        for number in over[: max(0, len(over) - limit)]:
            del self.versions[number]
