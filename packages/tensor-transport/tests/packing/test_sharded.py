"""Shards and their order as one value; bins that are exchanged between ranks."""

import pytest
import torch

from raycrew.tensor_transport import BatchedDataDict, ShardedBatch
from raycrew.tensor_transport.packing._bins import _exchange


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


@pytest.mark.parametrize(
    ("dealt", "loads"),
    [
        ([[0, 1], [2, 3]], [10, 4, 6, 1]),
        ([[0, 1], [2, 3]], [9, 8, 7, 2]),
        ([[0, 1, 2], [3, 4, 5]], [9, 9, 9, 8, 6, 1]),
    ],
)
def test_the_exchange_that_brings_two_ranks_closest_is_made(dealt, loads):
    before = [sum(loads[b] for b in one) for one in dealt]
    pairs = [(a, b) for a in dealt[0] for b in dealt[1]]
    best = min(abs(before[0] - before[1] - 2 * (loads[a] - loads[b])) for a, b in pairs)
    totals = list(before)
    assert _exchange(dealt, totals, loads)
    assert totals == [sum(loads[b] for b in one) for one in dealt]
    assert abs(totals[0] - totals[1]) == best
