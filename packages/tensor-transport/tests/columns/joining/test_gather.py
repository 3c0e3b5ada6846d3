"""Batches of several ranks, over gloo between processes."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from batches import assert_same

from raycrew.tensor_transport import BatchedDataDict, BatchSchemaError, PackedTensor, RaggedTensor

WORLD = 3


def batch_of(rank):
    rows = rank  # rank 0 has none
    return BatchedDataDict(
        {
            "x": torch.full((rows, 2 + rank), rank, dtype=torch.bfloat16),
            "mask": torch.ones(rows, dtype=torch.bool),
            "text": [f"{rank}.{i}" for i in range(rows)],
            "reward": np.full(rows, rank, dtype=np.float32),
            "ragged": RaggedTensor(torch.full((rows * 3,), rank), [3] * rows),
            "packed": PackedTensor([None if i else torch.full((1, rank), rank) for i in range(rows)], 1),
            "objects": np.array([*({"of": rank} for _ in range(rows)), None], dtype=object)[:-1],
        },
        metadata={"from": rank},
    )


def refused_by_all(rank):
    """What one rank cannot send, or no rank can join, is an error on every rank; then they go on."""
    bad = BatchedDataDict(x=torch.ones(2), log=[{"open": open(__file__)}] * 2)  # noqa: PTH123, SIM115
    batch, error = (bad, TypeError) if rank == 1 else (batch_of(rank), BatchSchemaError)
    with pytest.raises(error, match="cannot pickle" if rank == 1 else "rank 1: TypeError: cannot pickle"):
        batch.all_gather()
    bad["log"][0]["open"].close()
    with pytest.raises(BatchSchemaError, match="metadata 'from' differs"):
        batch_of(rank).all_gather()
    with pytest.raises(BatchSchemaError, match=r"column 'x' of torch.int64 does not hold the padding 0.5"):
        BatchedDataDict(x=torch.ones(1, rank, dtype=torch.int64)).all_gather(pad_value_dict={"x": 0.5})


def gather(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    gathered = batch_of(rank).all_gather(pad_value_dict={"x": 9}, pad_side="left", metadata="first")
    assert_same(
        gathered,
        BatchedDataDict.from_batches(
            [batch_of(r) for r in range(WORLD)], {"x": 9}, pad_side="left", metadata="first"
        ),
    )
    assert gathered["x"].dtype == torch.bfloat16
    gathered.to("cpu")["x"].zero_()
    group = dist.new_group([1, 2])
    if rank:
        pair = batch_of(rank).all_gather(group, {"x": 9}, metadata="first")
        assert_same(
            pair, BatchedDataDict.from_batches([batch_of(1), batch_of(2)], {"x": 9}, metadata="first")
        )
    refused_by_all(rank)
    without_rows = batch_of(rank) if rank else BatchedDataDict()
    found = without_rows.all_gather(metadata="first")
    assert found.size == 3 and list(found) == list(batch_of(1))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.hostile
def test_batches_of_different_sizes_meet_on_every_rank(tmp_path):
    mp.spawn(gather, (str(tmp_path / "store"),), nprocs=WORLD)
