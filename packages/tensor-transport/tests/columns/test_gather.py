"""Batches of several ranks, over gloo between processes."""

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from batches import assert_same

from raycrew.tensor_transport import BatchedDataDict, PackedTensor, RaggedTensor

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


def gather(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    gathered = batch_of(rank).all_gather(pad_value_dict={"x": 9}, pad_side="left")
    assert_same(
        gathered, BatchedDataDict.from_batches([batch_of(r) for r in range(WORLD)], {"x": 9}, pad_side="left")
    )
    assert gathered["x"].dtype == torch.bfloat16
    gathered.to("cpu")["x"].zero_()
    group = dist.new_group([1, 2])
    if rank:
        pair = batch_of(rank).all_gather(group, {"x": 9})
        assert_same(pair, BatchedDataDict.from_batches([batch_of(1), batch_of(2)], {"x": 9}))
    dist.barrier()
    dist.destroy_process_group()


def test_batches_of_different_sizes_meet_on_every_rank(tmp_path):
    mp.spawn(gather, (str(tmp_path / "store"),), nprocs=WORLD)
