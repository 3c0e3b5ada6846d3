"""The trainer's side: what is published, packed into buckets, as one version."""

from raycrew.tensor_transport.weights._publishing.publisher import WeightPublisher
from raycrew.tensor_transport.weights._publishing.source import gather_weights

__all__ = [
    "WeightPublisher",
    "gather_weights",
]
