"""Plans carried out: shards are offered, pulled, and written into the receivers' parameters."""

from raycrew.tensor_transport.weights.resharding._moving.loading import ShardLoader
from raycrew.tensor_transport.weights.resharding._moving.moving import (
    ReshardReceipt,
    ShardOffers,
    offer_shards,
    pull_shards,
)

__all__ = [
    "ReshardReceipt",
    "ShardLoader",
    "ShardOffers",
    "offer_shards",
    "pull_shards",
]
