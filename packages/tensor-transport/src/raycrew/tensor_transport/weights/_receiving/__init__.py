"""The generator's side: a version is fetched bucket by bucket, loaded, and kept or rolled back."""

from raycrew.tensor_transport.weights._receiving.receipt import WeightReceipt
from raycrew.tensor_transport.weights._receiving.receiver import WeightReceiver

__all__ = [
    "WeightReceipt",
    "WeightReceiver",
]
