"""What a directory is told by publishers, and by who asks for versions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from raycrew.tensor_transport.errors import WeightUpdateError
from raycrew.tensor_transport.weights._directory.ballots import Ballots
from raycrew.tensor_transport.weights._directory.shelf import Shelf
from raycrew.tensor_transport.weights._directory.versions import Announced, Begin, Begun, Finish, Part
from raycrew.tensor_transport.weights._update import Bucket, WeightUpdate, joined_name

Ended = tuple[WeightUpdate, list[Any], bool]


class Publications(Shelf):
    """Versions as their publishers bring them; see `Record`."""

    def enroll(self, now: float, part: int, publisher: str, scope: str) -> bool:
        """A publisher starts, whose buckets a scope can release; the one of this part before is replaced."""
        self._tidy(now)
        before = self._publishers.get(part)
        self._publishers[part] = publisher
        self._freed.enroll(part, publisher, scope)
        for version in self.versions.values() if before not in (None, publisher) else ():
            concerned = bool(version.parts) if version.ballots is None else part in version.parts
            if version.is_live and concerned:
                self._abort(version, f"the publisher of part {part} was replaced")
            if version.state == "aborted":
                version.begun.add(part)  # It was the one before that was asked for it.
        return self._tidy(now)

    def reserve(
        self, now: float, ballots: Sequence[str], deadline_s: float | None, key: str = "", route: str = ""
    ) -> int:
        """The number of a version that commits when all recipients have loaded it, and aborts else.

        Args:
            now: The time.
            ballots: What each recipient shows; see `RecipientVersion`.
            deadline_s: Until when.
            key: With one, it commits when it is confirmed, too.
            route: The key of the route over which its recipients take it while it is put.
        """
        self._tidy(now)
        for version in self._live():
            self._abort(version, "another update was begun")
        deadline = None if deadline_s is None else now + deadline_s
        version = self._open(Ballots(ballots, key), deadline)
        version.route = route
        return version.number

    def confirm(self, now: float, number: int, key: str, publisher: str) -> None:
        """Who asked for a version says who published what it wanted; else the version is given up.

        Raises:
            WeightUpdateError: Somebody else asked for it.
        """
        self._tidy(now)
        version = self.versions.get(number)
        if version is None or version.ballots is None or not version.is_live:
            return
        version.ballots.confirm(number, key)
        begins = [version.parts[part].begin for part in sorted(version.parts)]
        if version.state != "complete" or joined_name([begin.publisher for begin in begins]) != publisher:
            self._abort(version, "somebody else published, too: let nobody else publish meanwhile")
        self._decide(version)
        self._tidy(now)

    def dismiss(self, now: float, number: int) -> None:
        """Who asked for a version has nobody publish it any more."""
        self._tidy(now)
        if (version := self.versions.get(number)) is not None:
            version.is_called_for = False

    def begin(self, now: float, begin: Begin) -> int | None:
        """A publisher begins its part of a version; which one.

        Raises:
            StaleVersionError: The publisher was replaced, or the version is not above the last one.
            UpdateAbortedError: It is to publish a version that was given up before it began.
        """
        self._tidy(now)
        self._check_publisher(begin.part, begin.publisher)
        if begin.names is not None and not self._lineage.bases({begin.part: begin.names}):
            raise ValueError("there is no version that a partial update could be added to")
        version = self._version_for(begin)
        if version is None:
            return None
        self._remember(begin)
        plan = self._plans.get(begin.digest)
        version.parts[begin.part] = Part(begin, now + self.lease_s, plan)
        version.begun.add(begin.part)
        if len(version.parts) == begin.parts:
            version.bases = self._lineage.bases(version.names)
        return version.number

    def start(self, now: float, begin: Begin) -> Begun | None:
        """As `begin`; what is known of the version, and what `collect` does."""
        number = self.begin(now, begin)
        if number is None:
            return None
        version, freed = self.versions[number], tuple(self.collect(now, begin.scope))
        left_s = None if version.deadline is None else max(0.0, version.deadline - now)
        return Begun(number, version.route, left_s, version.is_unconfirmed, freed)

    def credit(
        self, now: float, number: int, part: int, publisher: str, size_bytes: int, window_bytes: int
    ) -> bool | None:
        """Whether so many bytes more may be put: what is ahead of the slowest voter has to fit the window."""
        if number in self.versions and self.versions[number].has(part, publisher):
            self.versions[number].parts[part].expires = now + self.lease_s
        version = self._living(now, number, part, publisher)
        version.is_metered = True
        ahead = [a for a in version.parts[part].buckets if not version.is_taken(a)]
        if not ahead or sum(a.bucket.size_bytes for a in ahead) + size_bytes <= window_bytes:
            return True
        version.is_hurried = True
        return None

    def announce(self, now: float, number: int, publisher: str, *buckets: Announced) -> bool:
        """Buckets can be fetched; whether somebody wants to hear of others before all are there."""
        for announced in buckets:
            version = self._living(now, number, announced.part, publisher)
            part = version.parts[announced.part]
            version.announced += 1
            part.buckets.append(replace(announced, place=version.announced))
            part.expires = now + self.lease_s
        return not self.versions[number].is_awaited_whole

    def finish(self, now: float, number: int, finish: Finish) -> WeightUpdate:
        """A part is complete; what it is now."""
        self.announce(now, number, finish.publisher, *finish.rest)
        version = self._living(now, number, finish.part, finish.publisher)
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

    def end(self, now: float, number: int, finish: Finish, scope: str) -> Ended:
        """As `finish`; what it returns, what `collect` does, and whether buckets were awaited one by one."""
        is_awaited = not self._living(now, number, finish.part, finish.publisher).is_awaited_whole
        return self.finish(now, number, finish), self.collect(now, scope), is_awaited

    def publish(self, now: float, begin: Begin, finish: Finish) -> Ended | None:
        """A publisher begins its part, and has all of it already: as `begin` and `end`, or not at all yet.

        Raises:
            Exception: As these.
        """
        number = self.begin(now, begin)
        return None if number is None else self.end(now, number, finish, begin.scope)

    def version_with(self, now: float, part: int, publisher: str, buckets: Sequence[Bucket]) -> int | None:
        """The version that has these buckets, for who did not hear whether it was published."""
        self._tidy(now)
        for version in self.versions.values():
            if version.has(part, publisher) and any(a.bucket in buckets for a in version.parts[part].buckets):
                return version.number
        return None

    def abort(
        self, now: float, number: int, reason: str, part: int | None = None, publisher: str = ""
    ) -> bool:
        """Give a version up, unless it is decided; whether it is.

        Who publishes a part gives up a version that has it: one that was begun anew, by who replaced it, is
        another one.
        """
        self._tidy(now)
        version = self.versions.get(number)
        if version is not None and version.is_live:
            if part is not None and not version.has(part, publisher):
                return True
            self._abort(version, reason)
        return version is None or version.state == "aborted"

    def retire(self, now: float, part: int, publisher: str) -> bool:
        """A publisher is closed: what it published is given up; if replaced, what it alone can release."""
        self._freed.retire(part, publisher)
        is_current = self._publishers.get(part) == publisher
        for version in [v for v in self.versions.values() if part in v.parts]:
            begin = version.parts[part].begin
            if is_current or (begin.publisher == publisher and not self._freed.is_claimable(begin.scope)):
                if version.is_live:
                    self._abort(version, f"the publisher of part {part} was closed")
                self._drop(version)
        self._tidy(now)
        return is_current

    def collect(self, now: float, scope: str, receiver: str = "") -> list[Any]:
        """Tickets of buckets that nobody needs any more, for one who can release them; see `Freed`."""
        self._tidy(now)
        return self._freed.collect(now, scope, receiver) if scope else []
