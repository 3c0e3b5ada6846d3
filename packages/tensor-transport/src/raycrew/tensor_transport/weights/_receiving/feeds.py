"""Where a receiver hears of buckets: an update that is complete, or the directory, as they are put."""

import threading
import time
from collections.abc import Sequence

from raycrew.tensor_transport.errors import ManifestMismatchError, UpdateAbortedError, WeightUpdateError
from raycrew.tensor_transport.weights._directory import (
    Announced,
    News,
    Pace,
    RecipientVersion,
    Record,
    Until,
    WeightDirectory,
)
from raycrew.tensor_transport.weights._receiving.fetching import Heading, Parcel
from raycrew.tensor_transport.weights._update import BucketPlan, TensorEntry, WeightUpdate, check_digest


class UpdateFeed:
    """The buckets of a complete update."""

    def __init__(self, update: WeightUpdate) -> None:
        if update.parts != 1:
            raise WeightUpdateError(
                f"this is part {update.part} of {update.parts} of version {update.version}: join_updates() "
                "makes one update of all parts",
                version=update.version,
            )
        self._update = update
        self._plan = update.plan
        self._index = 0

    def heading(self, timeout_s: float | None) -> Heading:  # noqa: ARG002
        """What is known before a byte moves."""
        update = self._update
        check_digest(update)
        return Heading(update.version, update.publisher, update.bases, [update.tensors], self._plan.schema)

    @property
    def is_over(self) -> bool:
        """Whether there are no more buckets."""
        return self._index == len(self._update.buckets)

    @property
    def is_at_hand(self) -> bool:
        """All of it is."""
        return True

    def next(self, timeout_s: float | None, *, is_patient: bool = False) -> Parcel | None:  # noqa: ARG002
        """The next bucket."""
        index, count = self._index, len(self._update.buckets)
        if index == count:
            return None
        self._index += 1
        return Parcel(index, str(count), self._update.buckets[index], self._plan.by_bucket[index])

    def check(self) -> None:
        """A complete update is not given up."""

    def stop(self) -> None:
        """Nobody waits."""


class PlanMemory:
    """The plans that a receiver knows by their digests: they are not sent again."""

    def __init__(self, limit: int = 32) -> None:
        self._known: dict[str, BucketPlan] = {}
        self._limit = limit

    @property
    def digests(self) -> frozenset[str]:
        """What is known."""
        return frozenset(self._known)

    def find(self, plans: Sequence[BucketPlan | None], digests: Sequence[str]) -> list[BucketPlan | None]:
        """The plan of each digest, that was sent or is known; None where there is none yet.

        Raises:
            ManifestMismatchError: What was sent has another digest.
        """
        found = [self._one(plan, digest) for plan, digest in zip(plans, digests, strict=True)]
        for digest, plan in zip(digests, found, strict=True):
            if plan is not None:
                self._known.pop(digest, None)
                self._known[digest] = plan
        while len(self._known) > max(self._limit, len(digests)):
            self._known.pop(next(iter(self._known)))
        return found

    def _one(self, plan: BucketPlan | None, digest: str) -> BucketPlan | None:
        if not digest:
            return None
        if plan is None:
            return self._known[digest]
        if plan.digest != digest:
            raise ManifestMismatchError(
                "the digest of the manifest differs from that of its publisher; nothing was fetched. "
                "Publisher and receiver may run different releases of raycrew"
            )
        return plan


class DirectoryFeed:
    """The buckets of a version as its publishers put them, or of a version that is kept."""

    def __init__(
        self,
        directory: WeightDirectory,
        version: int,
        receiver: str,
        node: str,
        memory: PlanMemory,
        *,
        is_patient: bool = False,
    ) -> None:
        self._directory, self._version = directory, int(version)
        self._ballot = version.ballot if isinstance(version, RecipientVersion) else ""
        self._receiver, self._node, self._is_patient = receiver, node, is_patient
        self._memory = memory
        self._plans: Sequence[BucketPlan | None] = ()
        self._seen: list[int] = []
        self._handed: list[int] = []
        self._waiting: list[Announced] = []
        self._done = self._counts = False
        self._pace = Pace()
        self._stopped = threading.Event()

    def heading(self, timeout_s: float | None) -> Heading:
        """What is known before a byte moves, once all publishers have begun."""
        known = self._memory.digests
        asked = (self._version, known, self._receiver, self._ballot, self._node, self._is_patient)
        offer = self._directory.wait(Record.offer, timeout_s, *asked)
        self._plans = self._memory.find(offer.plans, offer.digests)
        self._seen, self._handed = [0] * len(self._plans), [0] * len(self._plans)
        if offer.news is not None:
            self._hear(offer.news)
        plans = [plan for plan in self._plans if plan is not None]
        entries: list[tuple[TensorEntry, ...]] | None = None
        schema = None
        if len(plans) == len(self._plans):
            entries, schemas = [plan.tensors for plan in plans], [plan.schema for plan in plans]
            schema = schemas[0] if len(schemas) == 1 else {n: what for s in schemas for n, what in s.items()}
        return Heading(
            self._version, offer.publisher, offer.bases, entries, schema, offer.is_vote, is_numbered_once=True
        )

    def check(self) -> None:
        """Raise UpdateAbortedError if the version was given up."""
        if self._directory.ask(Record.decision, self._version) == "aborted":
            reason = self._directory.ask(Record.reason, self._version)
            raise UpdateAbortedError(f"version {self._version} was given up: {reason}")

    def stop(self) -> None:
        """Nobody wants more."""
        self._stopped.set()

    @property
    def is_over(self) -> bool:
        """Whether all buckets of a complete version were handed out."""
        return self._done and not self._waiting

    @property
    def is_at_hand(self) -> bool:
        """Whether the next bucket of a complete version is: of others, what is had is said, and answered."""
        return self._done and bool(self._waiting)

    def next(self, timeout_s: float | None, *, is_patient: bool = False) -> Parcel | None:
        """The next bucket of any part, as soon as it was put, or all were."""
        took = (self._version, self._receiver, tuple(self._handed))
        if self._stopped.is_set():  # Whoever asks counts as one that reads.
            return None
        if self._waiting:
            self._say(took)
        elif self._done:  # There is nothing more to be had of it that could be lost.
            if not self._counts:
                self._directory.tell(Record.took, *took)
        else:
            asked = (self._version, self._receiver, self._node, tuple(self._seen), is_patient)
            until = Until(timeout_s, self._stopped)
            self._hear(self._directory.wait(Record.news, until, *asked))
        if not self._waiting:
            return None
        announced = self._waiting.pop(0)
        self._handed[announced.part] += 1
        plan = self._plans[announced.part]
        entries = announced.entries or ()
        if plan is not None:
            entries = plan.by_bucket[announced.index]
        of = "?" if plan is None else str(len(plan.bucket_sizes))
        return Parcel(sum(self._handed) - 1, of, announced.bucket, entries)

    def _say(self, took: tuple[int, str, tuple[int, ...]]) -> None:
        """Say what is had, while more is at hand: a publisher may wait for that, or nodes that come after.

        It is not said of each bucket: those in shared memory are had faster than a directory answers.
        """
        if self._counts or not any(self._handed) or self._pace.is_silent():
            return
        began = time.monotonic()
        if self._done:
            self._directory.tell(Record.took, *took)
        else:
            self._directory.ask(Record.took, *took)
        self._pace.said(time.monotonic() - began)

    def _hear(self, news: News) -> None:
        self._pace.rest(news.quiet_s)  # What was had was said when this was asked.
        self._waiting, self._done, self._counts = list(news.buckets), news.done, news.counts
        for announced in news.buckets:
            self._seen[announced.part] += 1
