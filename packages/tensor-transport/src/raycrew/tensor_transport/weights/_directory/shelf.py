"""The versions of a directory, and what follows from time and from what is known of them."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from raycrew.tensor_transport.errors import (
    BucketFetchError,
    StaleVersionError,
    UpdateAbortedError,
    WeightUpdateError,
)
from raycrew.tensor_transport.weights._directory.ballots import Ballots
from raycrew.tensor_transport.weights._directory.freed import Freed
from raycrew.tensor_transport.weights._directory.lineage import Lineage
from raycrew.tensor_transport.weights._directory.relay import choose_fanout, relay_parent
from raycrew.tensor_transport.weights._directory.versions import (
    Announced,
    Begin,
    Version,
    VersionStatus,
    check_named,
)
from raycrew.tensor_transport.weights._update import Bucket, BucketPlan


class Shelf:
    """Versions by their number; see `Record`, which says what is said about them."""

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
        self._freed = Freed(lease_s)
        self._plans: dict[str, BucketPlan] = {}
        self._digests: dict[int, str] = {}
        self._lineage = Lineage()

    def next_expiry(self) -> float | None:
        """When something ends if nobody says anything before."""
        times: list[float] = []
        for version in self.versions.values():
            times += version.fetching.values()
            if version.is_live:
                times += [part.expires for part in version.awaited.values()]
                times += [] if version.deadline is None else [version.deadline]
        return min(times, default=None)

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

    def _live(self) -> list[Version]:
        return [version for version in self.versions.values() if version.is_live]

    def _open(self, ballots: Ballots | None = None, deadline: float | None = None) -> Version:
        self._last += 1
        version = self.versions[self._last] = Version(self._last, ballots, deadline)
        return version

    def _version_for(self, begin: Begin) -> Version | None:
        for version in self.versions.values():
            if version.refuses(begin.part):
                version.begun.add(begin.part)
                raise self._given_up(version)
        if not any(v.ballots is not None for v in self._live()):
            self._check_unasked(begin)
        for version in self._live():
            if version.state == "open" and begin.part not in version.parts:
                if version.ballots is None and (begin.version or 0) > version.number:
                    self._abort(version, f"part {begin.part} goes on with version {begin.version}")
                    continue
                return self._joined(version, begin)
            unfinished = version.state == "open" and version.parts[begin.part].finish is None
            if unfinished or (version.is_unconfirmed and begin.part in version.parts):
                self._abort(version, f"part {begin.part} was begun again: let nobody else publish meanwhile")
                if version.ballots is not None:
                    raise self._given_up(version)
            else:
                return None  # Others are not done with it.
        stored = [v for v in self.versions.values() if v.parts and v.state == "committed"]
        if len(stored) > max(self.keep, len(self._needed())):
            return None  # A receiver still reads what is to make room.
        if begin.version is not None and begin.version <= self._last:
            return self._reopened(begin, begin.version)
        self._last = self._last if begin.version is None else begin.version - 1
        return self._open()

    def _check_unasked(self, begin: Begin) -> None:
        """Refuse what nobody asks for where only such versions are taken, or could be one of several."""
        if self.keep == 0:
            raise WeightUpdateError("a directory with keep=0 takes updates from sync_weights() alone")
        if begin.version is None:
            check_named(begin.part, begin.parts)

    def _reopened(self, begin: Begin, number: int) -> Version:
        """A number that was given up, anew, for a part that knows it; who read of it has to ask again."""
        version = self.versions.get(number)
        is_over = version is not None and version.state == "aborted" and version.ballots is None
        if version is not None and is_over and begin.part not in version.begun:
            version.begun.add(begin.part)
            raise self._given_up(version)
        if version is None or not is_over or number != self._last:
            raise StaleVersionError(
                f"the last version is {self._last}: {number} is not above it", version=number
            )
        opened = self.versions[number] = Version(number, outdated=version.outdated | version.readers)
        return opened

    def _joined(self, version: Version, begin: Begin) -> Version:
        """An open version, if this part fits it."""
        if begin.version not in (None, version.number):
            asked = version.ballots is not None
            cause = ": sync_weights() numbers its versions; leave version= out" if asked else ""
            raise StaleVersionError(
                f"version {version.number} is being published, not {begin.version}{cause}",
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

    def _living(self, now: float, number: int, part: int, publisher: str) -> Version:
        self._tidy(now)
        version = self.versions.get(number)
        if version is None or version.state != "open":
            raise self._given_up(version or Version(number, reason="it is over"))
        if part not in version.parts:
            raise self._given_up(Version(number, reason=f"it was begun anew, without part {part} so far"))
        self._check_publisher(part, publisher)
        return version

    @staticmethod
    def _given_up(version: Version) -> UpdateAbortedError:
        reason = version.reason or f"it is {version.state}"
        return UpdateAbortedError(f"version {version.number} was given up: {reason}", version=version.number)

    def _readable(self, number: int, receiver: str | None = None) -> Version:
        version = self.versions.get(number)
        if version is not None and receiver in version.outdated:
            raise self._given_up(Version(number, reason="it was begun anew, or this receiver gave it up"))
        if version is not None and version.state == "aborted":
            raise self._given_up(version)
        if version is None or (version.state == "committed" and not version.parts):
            kept = [n for n, v in self.versions.items() if v.state == "committed" and v.parts]
            raise BucketFetchError(
                f"version {number} is not kept (keep={self.keep}); there are {kept}", version=number
            )
        return version

    def _relayed(self, version: Version, node: str, announced: Announced) -> bool:
        """Whether a node may fetch a bucket: its parent in the relay has it."""
        fanout = None if version.route else self.fanout
        if fanout == "auto":
            sizes = [part.plan.bucket_sizes for part in version.parts.values() if part.plan is not None]
            fanout = choose_fanout(len(version.nodes), max(1, sum(map(len, sizes))))
        parent = relay_parent(list(version.nodes), node, fanout)
        if parent is None:
            return True
        return version.has_taken(version.nodes[parent], announced)

    def _admit(self, version: Version, receiver: str, ballot: str) -> None:
        """Let a receiver count for a recipient, in place of the one that did so far."""
        if version.ballots is None or not version.is_live:
            return
        before = version.ballots.admit(version.number, receiver, ballot)
        version.votes.pop(receiver, None)  # Whoever asks what there is has loaded nothing: it was restarted.
        if before:
            version.forget(before)
            version.votes.pop(before, None)
            version.taken.pop(before, None)
            self.holders.pop(before, None)

    def _note_taken(self, version: Version, receiver: str, seen: Sequence[int]) -> None:
        version.taken[receiver] = tuple(seen)
        if self.keep:
            return
        for part in version.parts.values():
            for i, announced in enumerate(part.buckets):
                if announced.bucket.ticket is not None and version.is_taken(announced):
                    self._freed.add(part.begin.scope, announced.bucket)
                    emptied = Bucket(None, announced.bucket.size_bytes, announced.bucket.checksum)
                    part.buckets[i] = replace(announced, bucket=emptied)

    def _decide(self, version: Version) -> None:
        if version.state == "complete" and version.is_chosen:
            version.state = "committed"
            self._lineage.note(version.number, version.names)
            for receiver, loaded in version.votes.items():
                if loaded:
                    self._hold(receiver, version.number)

    def _hold(self, receiver: str, number: int) -> None:
        self.holders[receiver] = number
        for version in self.versions.values():
            version.fetching.pop(receiver, None)

    def _miss(self, receiver: str, reason: str) -> None:
        """A receiver holds nothing and reads nothing: what needs its vote is given up."""
        self.holders.pop(receiver, None)
        for version in self.versions.values():
            version.forget(receiver)
            if version.is_live and version.ballots is not None and version.is_voter(receiver):
                self._abort(version, f"receiver {receiver} {reason}")

    def _abort(self, version: Version, reason: str) -> None:
        version.state, version.reason, version.fetching = "aborted", reason, {}
        self._drop(version)

    def _drop(self, version: Version) -> None:
        for part in version.parts.values():
            for announced in part.buckets:
                self._freed.add(part.begin.scope, announced.bucket)
        version.parts, version.bases = {}, frozenset()

    def _tidy(self, now: float) -> bool:
        """End what is over: leases, deadlines, versions that nobody needs."""
        for version in [v for v in self.versions.values() if v.fetching or v.is_live]:
            silent = [r for r, until in version.fetching.items() if until <= now]
            for receiver in silent:
                version.forget(receiver)
                self.holders.pop(receiver, None)
                self._freed.leave(receiver)
            if not version.is_live:
                continue
            late = [i for i, part in version.awaited.items() if part.expires <= now]
            if late:
                others = "" if version.is_begun else ", and other parts are not begun"
                silence = f"are silent since {self.lease_s:g} s{others}"
                self._abort(version, f"the publishers of parts {late} {silence}")
            elif silent and version.ballots is not None:
                self._abort(version, f"receivers {silent} are silent since {self.lease_s:g} s")
            elif version.deadline is not None and version.deadline <= now:
                self._abort(version, "not all receivers had loaded it by its deadline")
        if stored := {n for n, v in self.versions.items() if v.parts and v.state == "committed"}:
            for number in stored - self._needed():
                if not self.versions[number].fetching:
                    self._drop(self.versions[number])
        self._freed.forget(now)
        self._forget()
        return True

    def _needed(self) -> set[int]:
        """The versions to keep: the last ones, and those that they have to be added to."""
        numbers = sorted(self.versions, reverse=True)  # Many are known, and few have anything.
        committed = (number for number in numbers if self.versions[number].state == "committed")
        needed = set(itertools.islice(committed, self.keep))
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
        if len(self.versions) <= limit:
            return
        over = [n for n, v in self.versions.items() if not v.is_live and not v.parts]
        for number in over[: max(0, len(over) - limit)]:
            del self.versions[number]
