"""The driver's side: publish in the trainer, apply in the generators, check that all hold one version."""

import time
from dataclasses import dataclass

from raycrew.tensor_transport.errors import WeightUpdateError
from raycrew.tensor_transport.protocols import PeerGroup
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
        resume: Method called on the generators afterwards, also when the update failed.
        timeout_s: Deadline of each of the steps.

    Raises:
        WeightUpdateError: No rank or several ranks published, or the generators report different versions.
        Exception: What the groups raise for a failed rank. Generators that failed still report their previous
            version; the update stays published, and calling this again brings all of them to one version.
    """
    start = time.perf_counter()
    update = _the_update(trainer.call(publish).get_results(timeout=timeout_s), publish)
    paused_at = time.perf_counter()
    if pause is not None:
        generators.call(pause).get_results(timeout=timeout_s)
    try:
        results = generators.call(apply, update).get_results(timeout=timeout_s)
    except Exception as error:
        error.add_note(
            f"weight update {update.version} did not reach every generator; it can be applied again"
        )
        raise
    finally:
        if resume is not None:
            generators.call(resume).get_results(timeout=timeout_s)
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
