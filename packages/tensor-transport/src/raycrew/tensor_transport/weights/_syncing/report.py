"""What a synchronisation says of itself, during it and afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from raycrew.tensor_transport.errors import WeightUpdateError
from raycrew.tensor_transport.weights._receiving import WeightReceipt


@dataclass(frozen=True, slots=True)
class SyncProgress:
    """How far a synchronisation is.

    Attributes:
        phase: "publish", "prepare", "pause", "apply" or "resume".
        done: How many ranks have done it.
        total: How many there are.
    """

    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class RankSpan:
    """A bar of a chart: what one rank did when, in seconds from the start of the synchronisation.

    Times of other machines are by their own clocks.

    Attributes:
        rank: As "trainer 0" or "generator 2".
        phase: "turn", "gather", "put", "pause", "wire", "ahead" or "load".
        start_s: When it began.
        end_s: When it ended.
    """

    rank: str
    phase: str
    start_s: float
    end_s: float


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
        total_s: Wall time of the whole call, with the wait for the route's other updates (the span "turn").
        receipts: What each generator reported, in rank order.
        spans: What each rank did when, to be drawn.
        publisher: Whose version it is: `WeightReceiver.require` compares it, and the number.
        started_at: When it began, in seconds since the epoch.
    """

    version: int
    size_bytes: int
    gather_s: float
    wire_s: float
    load_s: float
    pause_s: float
    total_s: float
    receipts: tuple[WeightReceipt, ...]
    spans: tuple[RankSpan, ...] = field(default=(), repr=False)
    publisher: str = ""
    started_at: float = 0.0


def can_return(prepared: object) -> bool:
    """Whether a generator that says this of `prepare` may load a version that is given up afterwards."""
    return isinstance(prepared, WeightReceipt) and prepared.can_return


def checked_receipts(results: Mapping[int, object], version: int, method: str) -> tuple[WeightReceipt, ...]:
    """The generators' results, by their numbers: receipts, all of one version.

    Raises:
        WeightUpdateError: There is none of some generator, or one of another version.
    """
    receipts = {n: result for n, result in results.items() if isinstance(result, WeightReceipt)}
    if not receipts or len(receipts) < len(results):
        raise WeightUpdateError(
            f"{method}() has to return WeightReceiver.apply()'s receipt on every generator; got "
            f"{list(results.values())!r}"
        )
    if wrong := {n: receipt.version for n, receipt in receipts.items() if receipt.version != version}:
        raise WeightUpdateError(f"generators report other versions than {version}: {wrong}", version=version)
    return tuple(receipts.values())
