"""What one receiver says after an update."""

from dataclasses import dataclass, field

from raycrew.tensor_transport.weights._update import Span


@dataclass(frozen=True, slots=True)
class WeightReceipt:
    """What one receiver says after an update.

    Attributes:
        version: The version that it now holds; after `prepare`, the one that it is ready to load.
        size_bytes: Bytes fetched; 0 where the version was held already.
        wire_s: Seconds in which loading waited for bytes (fetching and checksums).
        load_s: Seconds spent in the `load` callable itself.
        previous_version: What it held before, None for the first.
        spans: When it did what.
        can_return: After `prepare`, whether what it holds comes back at once if the version is loaded and
            then given up.
    """

    version: int
    size_bytes: int
    wire_s: float
    load_s: float
    previous_version: int | None = None
    spans: tuple[Span, ...] = field(default=(), repr=False)
    can_return: bool = False
