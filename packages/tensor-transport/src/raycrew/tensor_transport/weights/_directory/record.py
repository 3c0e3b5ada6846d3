"""What a directory of versions knows, and what it decides: a state machine without clock, threads or Ray.

Every method takes the time. What returns None is not possible yet: ask again after a change.
"""

from collections.abc import Sequence
from typing import Any

from raycrew.tensor_transport.errors import BucketFetchError, UpdateAbortedError, WeightUpdateError
from raycrew.tensor_transport.weights._directory.publications import Publications
from raycrew.tensor_transport.weights._directory.versions import SMALL_BYTES, News, Offer, State, Version
from raycrew.tensor_transport.weights._update import WeightUpdate, join_updates, joined_name

Outcome = tuple[State, list[Any]]


class Record(Publications):
    """The record of one publisher group.

    Args:
        keep: How many committed versions stay available.
        lease_s: How long a publisher, or a receiver that fetches, may be silent before it counts as dead.
        fanout: How many nodes fetch from one; None where all fetch from the publishers' nodes, "auto" for
            what is earliest done.
    """

    def offer(
        self,
        now: float,
        number: int,
        known: frozenset[str] = frozenset(),
        receiver: str = "",
        ballot: str = "",
        node: str = "",
        is_patient: bool = False,
    ) -> Offer | None:
        """What a version has, once all its publishers have begun; without plans whose digest is known.

        With a node, it begins to read a whole version there, and has those buckets that can be fetched. (What
        a partial one is added to may have to be read before, and take any time.) One that is patient, see
        `news`, and knows all plans, so that there is nothing to refuse, hears no more before that.

        Raises:
            WeightUpdateError: It is being decided by others, to whose ballots this one does not belong.
            UpdateAbortedError: It was given up.
            BucketFetchError: It is not kept any more.
        """
        self._tidy(now)
        version = self.versions.get(number)
        if version is None and number > self._last:
            return None
        version = self._readable(number)
        self._admit(version, receiver, ballot)
        if not version.is_begun:
            return None
        version.readers.add(receiver)
        version.outdated.discard(receiver)
        begins = [version.parts[i].begin for i in sorted(version.parts)]
        news, digests = None, tuple(begin.digest for begin in begins)
        if node and version.bases is None:
            news = self.news(now, number, receiver, node, [0] * len(begins), is_patient)
            if news is None and is_patient and known.issuperset(digests):
                return None
        return Offer(
            number,
            joined_name([begin.publisher for begin in begins]),
            tuple(None if b.digest in known else self._plans.get(b.digest) for b in begins),
            digests,
            version.bases,
            version.ballots is not None and version.state != "committed",
            news,
        )

    def news(
        self, now: float, number: int, receiver: str, node: str, seen: Sequence[int], is_patient: bool = False
    ) -> News | None:
        """Buckets of a version that a receiver has not seen, `seen` of each part.

        All receivers hear of them in one order: where these take them all together, none waits for another.
        One that is patient has no use for some of them, and takes no time for all: it hears of all at once,
        unless a publisher waits for it.
        """
        version = self._read_by(now, number, receiver)
        (version.patient.add if is_patient else version.patient.discard)(receiver)
        version.nodes.setdefault(node, receiver)
        self._note_taken(version, receiver, seen)
        fresh = [
            announced
            for index, part in sorted(version.parts.items())
            for announced in part.buckets[seen[index] :]
            if self._relayed(version, node, announced)
        ]
        total = len(version.buckets)
        fresh.sort(key=lambda announced: announced.place)
        done = version.state != "open" and sum(seen) + len(fresh) == total
        if not done and (not fresh or version.waits(receiver)):
            return None
        takes_no_time = is_patient or (total == 1 and version.size_bytes <= SMALL_BYTES)
        counts = done and takes_no_time and self._stays(version)
        if counts:
            had = [len(version.parts[index].buckets) for index in sorted(version.parts)]
            self._note_taken(version, receiver, had)
        if not fresh or counts:  # It has all, and may take its time to load.
            version.fetching.pop(receiver, None)
        return News(tuple(fresh), done, counts, self._quiet_s(version))

    def took(self, now: float, number: int, receiver: str, seen: Sequence[int]) -> None:
        """A receiver has so many buckets of each part.

        Nobody waits for the answer, and what is told so may come late: after all of it was had, or after the
        receiver has left. Then it takes nothing back, and nobody begins to read by it.
        """
        version = self._read_by(now, number, receiver, begins=False)
        had = version.taken.get(receiver, ())
        seen = tuple(map(max, seen, had)) if len(had) == len(seen) else seen
        if version.state != "open" and sum(seen) == len(version.buckets):
            version.fetching.pop(receiver, None)
        self._note_taken(version, receiver, seen)

    def vote(self, now: float, number: int, receiver: str, loaded: bool, reason: str) -> None:
        """A receiver has loaded a version, or cannot, or has given it up though it had loaded it."""
        self._tidy(now)
        if not loaded and self.holders.get(receiver) == number:
            del self.holders[receiver]
        version = self.versions.get(number)
        if version is None:
            return
        version.fetching.pop(receiver, None)
        if not loaded:  # Other nodes may wait for what this one was to fetch, and may still ask for.
            version.forget(receiver)
            version.outdated.add(receiver)
        if not version.is_live or not version.is_voter(receiver):
            return
        version.votes[receiver] = loaded
        if not loaded and version.ballots is not None:
            self._abort(version, f"receiver {receiver}: {reason}")
        self._decide(version)

    def _quiet_s(self, version: Version) -> float:
        """How long a receiver may keep to itself which buckets it has, unless others may wait for some."""
        is_awaited = version.is_metered or len(version.nodes) > 1 or not version.is_read_by_all
        return 0.0 if is_awaited or not self._stays(version) else self.lease_s / 4

    def _stays(self, version: Version) -> bool:
        """Whether all there is stays until each reader votes."""
        return self.keep > 0 and version.ballots is not None and version.is_live

    def _read_by(self, now: float, number: int, receiver: str, *, begins: bool = True) -> Version:
        """The version that a receiver reads, whose lease begins anew; unless it `begins`, only if it has one.

        Raises:
            UpdateAbortedError: It was given up, or another receiver took this place before its decision.
            BucketFetchError: It is not kept any more.
        """
        version = self.versions.get(number)
        if version is not None and version.is_live and not version.is_voter(receiver):
            raise UpdateAbortedError(f"version {number}: another receiver took the place of {receiver}")
        is_there = version is not None and version.state != "aborted" and receiver not in version.outdated
        if version is not None and is_there and (begins or receiver in version.fetching):
            version.fetching[receiver] = now + self.lease_s
        self._tidy(now)
        return self._readable(number, receiver)

    def decision(self, now: float, number: int) -> State | None:
        """Whether a version is committed or aborted; what is not known any more is aborted."""
        self._tidy(now)
        version = self.versions.get(number)
        if version is None:
            return "aborted"
        return None if version.is_live else version.state

    def outcome(self, now: float, number: int, scope: str, receiver: str) -> Outcome | None:
        """As `decision`; once the version counts, also what `collect` does: the one before may have to go."""
        state = self.decision(now, number)
        if state is None:
            return None
        return state, self.collect(now, scope, receiver) if state == "committed" else []

    def reason(self, now: float, number: int) -> str:
        """Why a version was aborted."""
        self._tidy(now)
        version = self.versions.get(number)
        return "it is not known any more" if version is None else version.reason

    def hold(self, now: float, receiver: str, number: int) -> None:
        """A receiver holds a version, and reads no other one; of those that voted for one it is known."""
        self._hold(receiver, number)
        self._tidy(now)

    def arrive(self, now: float, receiver: str) -> None:
        """A receiver was made, or made again: it holds nothing, and can vote for nothing it had."""
        self._miss(receiver, "was made again before its vote counted")
        self._tidy(now)

    def leave(self, now: float, receiver: str) -> None:
        """A receiver is gone."""
        self._freed.leave(receiver)
        self._miss(receiver, "left")
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
