"""The driver's side: publish in the trainer, apply in the generators, check that all hold one version."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from raycrew.tensor_transport.errors import WeightUpdateError
from raycrew.tensor_transport.protocols import PeerGroup, PeerResults
from raycrew.tensor_transport.weights._manifest import WeightUpdate
from raycrew.tensor_transport.weights._receiver import WeightReceipt


@dataclass(frozen=True, slots=True)
class WeightSyncReport:
    """One synchronisation, and where its time went.

    Attributes:
        version: The version that every generator now holds.
        size_bytes: Bytes that each generator fetched (the largest of them).
        gather_s: Collecting the weights in the trainer, and copying them into the store.
        wire_s: Waiting for bytes in the slowest generator.
        load_s: Loading in the slowest generator.
        pause_s: How long the generators were kept from generating: from the pause to the resumption.
        total_s: Wall time of the whole call.
        receipts: What each generator reported, in rank order.
    """

    version: int
    size_bytes: int
    gather_s: float
    wire_s: float
    load_s: float
    pause_s: float
    total_s: float
    receipts: tuple[WeightReceipt, ...]


def sync_weights(
    trainer: PeerGroup,
    generators: PeerGroup,
    *,
    publish: str = "publish_weights",
    apply: str = "apply_weights",
    pause: str | None = None,
    resume: str | None = None,
    timeout_s: float | None = 600.0,
) -> WeightSyncReport:
    """Bring the generators to the trainer's weights; only a small `WeightUpdate` passes through the driver.

    Args:
        trainer: Its ranks have a method `publish` that returns the `WeightUpdate` on one rank, else None.
        generators: Their ranks have a method `apply` that takes the update and returns the `WeightReceipt`.
        publish: Name of the trainer's method.
        apply: Name of the generators' method.
        pause: Method called on the generators before the update is applied.
        resume: Method called on the generators afterwards, also when a pause or the update failed: on each
            rank but those whose weights are, or may be, a mixture. These stay paused until an update reaches
            them. It has to bear being called on a rank whose pause failed.
        timeout_s: Deadline of each of the steps.

    Raises:
        WeightUpdateError: No rank or several ranks published, or the generators report different versions.
        Exception: What the group raises for the first rank that failed; its notes name the other ranks, and
            those that were not resumed. Generators that failed still report their previous version; the
            update stays published, and calling this again brings all of them to one version.
    """
    start = time.perf_counter()
    update = _the_update(trainer.call(publish).get_results(timeout=timeout_s), publish)
    paused_at = time.perf_counter()
    session = _Session(generators, timeout_s)
    if pause is not None:
        session.call(pause)
    results = [] if session.failures else session.call(apply, update, changes_weights=True)
    if resume is not None:
        session.resume(resume)
    session.raise_first(update)
    end = time.perf_counter()
    receipts = _checked_receipts(results, update, apply)
    return WeightSyncReport(
        version=update.version,
        size_bytes=max(receipt.size_bytes for receipt in receipts),
        gather_s=update.gather_s + update.put_s,
        wire_s=max(receipt.wire_s for receipt in receipts),
        load_s=max(receipt.load_s for receipt in receipts),
        pause_s=end - paused_at,
        total_s=end - start,
        receipts=receipts,
    )


class _Session:
    """Calls on every generator, rank by rank, and what is known of each rank afterwards."""

    def __init__(self, generators: PeerGroup, timeout_s: float | None) -> None:
        self.failures: dict[int, Exception] = {}
        self._notes: list[str] = []
        self._timeout_s = timeout_s
        self._ranks = [int(getattr(entry, "rank", entry)) for entry in generators.ranks]
        self._peers = {rank: generators.on(ranks=[rank]) for rank in self._ranks}
        self._mixed: set[int] = set()
        self._reached_all = False

    def call(self, method: str, *args: object, changes_weights: bool = False) -> list[object]:
        """Call a method on all ranks; failures are kept."""
        results, failures = self._call(self._ranks, method, *args)
        self.failures |= failures
        if changes_weights:
            self._mixed = {rank for rank, error in failures.items() if not _is_intact(error)}
        return results

    def resume(self, method: str) -> None:
        """Call a method on the ranks whose weights are those of one version."""
        _, failures = self._call([rank for rank in self._ranks if rank not in self._mixed], method)
        self._notes += [f"{method}() failed on rank {rank}: {error!r}" for rank, error in failures.items()]
        self._notes += [
            f"rank {rank} is not resumed: its weights are, or may be, a mixture of two versions"
            for rank in sorted(self._mixed)
        ]
        if not self.failures:
            self.failures, self._reached_all = failures, True

    def raise_first(self, update: WeightUpdate) -> None:
        """Raise the first failure, if there was one."""
        if not self.failures:
            return
        (rank, error), *others = sorted(self.failures.items())
        self._notes += [f"rank {other} failed, too: {failure!r}" for other, failure in others]
        if not self._reached_all:
            self._notes.append(
                f"rank {rank} failed: weight update {update.version} did not reach every generator; "
                "it can be applied again"
            )
        for note in self._notes:
            error.add_note(note)
        raise error

    def _call(
        self, ranks: Sequence[int], method: str, *args: object
    ) -> tuple[list[object], dict[int, Exception]]:
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        failures: dict[int, Exception] = {}
        pending: dict[int, PeerResults] = {}
        for rank in ranks:
            try:
                pending[rank] = self._peers[rank].call(method, *args)
            except Exception as error:  # noqa: BLE001 - raised once all ranks are where they have to be
                failures[rank] = error
        results: list[object] = []
        for rank, answer in pending.items():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                results += answer.get_results(timeout=left)
            except Exception as error:  # noqa: BLE001 - as above
                failures[rank] = error
        return results, failures


def _is_intact(error: BaseException) -> bool:
    """Whether a failed rank said that its weights are those of one version; a silent one did not."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, WeightUpdateError):
            return found.intact
        found = found.__cause__ or found.__context__
    return False


def _the_update(results: list[object], method: str) -> WeightUpdate:
    updates = [result for result in results if isinstance(result, WeightUpdate)]
    strangers = [type(r).__name__ for r in results if r is not None and not isinstance(r, WeightUpdate)]
    if len(updates) != 1 or strangers:
        found = ", ".join(strangers) or f"{len(updates)} updates"
        raise WeightUpdateError(f"{method}() has to return a WeightUpdate on exactly one rank; got {found}")
    return updates[0]


def _checked_receipts(results: list[object], update: WeightUpdate, method: str) -> tuple[WeightReceipt, ...]:
    receipts = tuple(result for result in results if isinstance(result, WeightReceipt))
    if not receipts or any(r is not None and not isinstance(r, WeightReceipt) for r in results):
        raise WeightUpdateError(f"{method}() has to return WeightReceiver.apply()'s receipt; got {results!r}")
    if wrong := {rank: r.version for rank, r in enumerate(receipts) if r.version != update.version}:
        raise WeightUpdateError(
            f"generators report other versions than {update.version}: {wrong}", version=update.version
        )
    return receipts
