"""Shards and their order as one value."""

import pytest
import torch

from raycrew.tensor_transport import BatchedDataDict, ShardedBatch


def test_shards_are_as_many_as_they_are():
    sharded = ShardedBatch(["a", "b", "c"], [2, 0, 1])
    assert sharded.shard(3) == ["a", "b", "c"] and sharded
    for n in (2, 4):
        with pytest.raises(ValueError, match=f"sharded into 3, and {n} shards are needed"):
            sharded.shard(n)


def test_parts_are_joined_as_their_class_joins_them_one_too():
    one, other = BatchedDataDict(x=torch.ones(1)), BatchedDataDict(x=torch.zeros(2))
    assert ShardedBatch.concat([one])["x"].tolist() == [1]
    assert ShardedBatch.concat([one, other])["x"].tolist() == [1, 0, 0]
