"""Weight updates that carry only what changed since the version that was committed last."""

from raycrew.tensor_transport.weights.deltas._packed import Delta, encode_delta
from raycrew.tensor_transport.weights.deltas._source import DeltaSource, DeltaUpdate
from raycrew.tensor_transport.weights.deltas._target import DeltaTarget

__all__ = ["Delta", "DeltaSource", "DeltaTarget", "DeltaUpdate", "encode_delta"]
