"""Batches whose columns are handles: every operation does what it does to the tensors, and reads nothing."""

import pickle
import tracemalloc

import numpy as np
import pytest
import torch
from batches import assert_same, same
from hypothesis import given, settings
from hypothesis import strategies as st

from raycrew.tensor_transport import (
    BatchedDataDict,
    BatchSchemaError,
    PackedTensor,
    RaggedTensor,
    RTensor,
    ShardRegistry,
    TensorShardInfo,
    collect_shards,
    localize,
    release,
    remotize,
)
from raycrew.tensor_transport.testing import InProcessBackend

DTYPES = st.sampled_from([torch.bfloat16, torch.float32, torch.int64, torch.bool])


def numbered(shape, dtype):
    return torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)


@st.composite
def batches(draw):
    """A batch with a column of every kind, 0 rows included."""
    rows = draw(st.integers(0, 6))
    lengths = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
    holes = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    dtype = draw(DTYPES)
    return BatchedDataDict(
        {
            "ids": numbered((rows, 3), dtype),
            "text": [f"row {i}" for i in range(rows)],
            "mask": torch.arange(rows) % 2 == 0,
            "ragged": RaggedTensor(numbered((sum(lengths), 2), dtype), lengths),
            "packed": PackedTensor(
                [
                    None if hole else torch.full((2, n), i, dtype=dtype)
                    for i, (n, hole) in enumerate(zip(lengths, holes, strict=True))
                ],
                1,
            ),
            "reward": np.arange(rows, dtype=np.float32),
        },
        metadata={"step": 3, "policy": torch.ones(2)},
    )


@st.composite
def operations(draw):
    """A function that does the same to a batch of tensors and to one of handles."""
    kind = draw(
        st.sampled_from(["select", "mask", "slice", "shard", "reorder", "repeat", "join", "truncate"])
    )
    seed = draw(st.integers(0, 10**6))

    def apply(batch):
        rows, random = batch.size, np.random.default_rng(seed)
        match kind:
            case "select":
                return batch.select_indices(random.integers(-rows, rows, 5) if rows else [])
            case "mask":
                return batch.select_indices(torch.from_numpy(random.integers(0, 2, rows) > 0))
            case "slice":
                start, end = sorted(random.integers(0, rows + 1, 2).tolist())
                return batch.slice(start, end)
            case "shard":
                parts = batch.shard_by_batch_size(3, allow_uneven_shards=True).shards
                return BatchedDataDict.concat(parts[::-1])
            case "reorder":
                return batch.copy().reorder_data(random.permutation(rows))
            case "repeat":
                return batch.repeat_interleave(2) if rows < 40 else batch
            case "join":
                return BatchedDataDict.from_batches([batch, batch.slice(0, rows // 2)])
            case "truncate":
                return batch.copy().truncate_tensors(1, 1)

    return apply


def handles_of(batch):
    return [batch["ids"], batch["mask"], batch["ragged"].values, *batch["packed"].tensors]


@pytest.mark.smoke
@settings(max_examples=200)
@given(batches(), st.lists(operations(), max_size=4))
def test_handles_do_what_their_tensors_would(batch, chain):
    backend = InProcessBackend()
    registry = ShardRegistry(backend)
    remote = remotize(batch, registry)
    assert all(handle is None or isinstance(handle, RTensor) for handle in handles_of(remote))
    for operation in chain:
        batch, remote = operation(batch), operation(remote)
    assert remote.size == batch.size and remote.size_bytes == batch.size_bytes
    remote = pickle.loads(pickle.dumps(remote))
    assert backend.fetches == 0, "an operation on handles reads nothing"
    local = localize(remote, registry)
    assert_same(local, batch)
    assert type(local) is type(batch)
    release([remote], registry)


@given(batches(), st.integers(1, 8))
def test_shard_then_concat_of_handles(batch, parts):
    registry = ShardRegistry(InProcessBackend())
    shards = remotize(batch, registry).shard(parts)
    assert_same(localize(BatchedDataDict.concat(shards), registry), batch)
    assert_same(BatchedDataDict.concat([localize(shard, registry) for shard in shards]), batch)


@given(batches(), st.randoms(use_true_random=False))
def test_reorder_then_inverse_of_handles(batch, random):
    registry = ShardRegistry(InProcessBackend())
    order = list(range(batch.size))
    random.shuffle(order)
    back = remotize(batch, registry).select_indices(order).reorder_data(order)
    assert_same(localize(back, registry), batch)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8),
)
def test_ranges_may_cross_shards(sizes, ranges):
    registry = ShardRegistry(InProcessBackend())
    parts = [torch.randn(size, 2) for size in sizes]
    whole, handle = torch.cat(parts), RTensor.concat(registry.put(parts))
    starts = np.array([start % (len(whole) + 1) for start, _ in ranges], np.int64)
    lengths = np.array([n % (len(whole) - s + 1) for s, (_, n) in zip(starts, ranges, strict=True)], np.int64)
    taken = handle.take_ranges(starts, lengths)
    wanted = [whole[s : s + n] for s, n in zip(starts, lengths, strict=True)]
    assert torch.equal(registry.fetch([taken])[0], torch.cat([whole[:0], *wanted]))


def test_only_the_rows_that_are_needed_are_read():
    backend = InProcessBackend()
    registry = ShardRegistry(backend)
    ragged, images = RaggedTensor(torch.arange(1000), [100] * 10), [torch.ones(5, 2) for _ in range(10)]
    remote = remotize(BatchedDataDict(ragged=ragged, images=PackedTensor(images)), registry)
    assert len(collect_shards(remote)) == 11
    picked = localize(remote.select_indices([7, 1]), registry)
    assert same(picked["ragged"], ragged.take(np.array([7, 1])))
    assert backend.rows_read == 2 * 100 + 2 * 5
    release(remote, registry)
    assert backend.stats().held_bytes == 0


def test_small_tensors_of_a_packed_column_may_stay():
    registry = ShardRegistry(InProcessBackend())
    images = PackedTensor([torch.ones(100, 2), None, torch.ones(1, 2)])
    remote = remotize({"images": images}, registry, min_bytes=100)["images"]
    assert [type(row) for row in remote] == [RTensor, type(None), torch.Tensor]
    assert same(localize(remote, registry), images)
    with pytest.raises(TypeError, match=r"handles: localize\(\) them first"):
        remote.as_tensor()


def test_what_needs_data_says_so():
    registry = ShardRegistry(InProcessBackend())
    batch = BatchedDataDict(
        r=RaggedTensor(torch.ones(3, 2, 2), [1, 2]), x=torch.ones(2, 3, 4), lengths=torch.tensor([1, 2])
    )
    remote = remotize(batch, registry)
    with pytest.raises(TypeError, match=r"handle: localize\(\) them first"):
        remote["r"].to_padded()
    with pytest.raises(ValueError, match="a handle can't be truncated along dimension 2"):
        remote.truncate_tensors(2, 1)
    with pytest.raises(BatchSchemaError, match="column 'r': some parts are handles"):
        BatchedDataDict.concat([remote.select_indices([0]), batch])
    other = remotize(BatchedDataDict(r=batch["r"], x=torch.ones(2, 3, 5), lengths=batch["lengths"]), registry)
    with pytest.raises(BatchSchemaError, match=r"column 'x': handles of columns|column 'x': a shard of"):
        BatchedDataDict.concat([remote, other])
    packing = {"max_tokens_per_microbatch": 4, "input_lengths_key": "lengths"}
    with pytest.raises(BatchSchemaError, match=r"column 'lengths' is a handle.*localize\(\)"):
        remote.shard_by_batch_size(1, sequence_packing_args=packing)


def made_up_batch(producers=64, rows=320, width=2048):
    """10 GB that nobody holds: no registry could read these handles."""

    def column(key, dtype, *inner):
        return RTensor.concat(
            [
                RTensor(TensorShardInfo("nowhere", f"{key}-{i}", f"owner-{i}", "", dtype, (rows, *inner)))
                for i in range(producers)
            ]
        )

    lengths = np.random.default_rng(0).integers(1, width, producers * rows)
    values = TensorShardInfo("nowhere", "response", "owner", "", "bfloat16", (int(lengths.sum()), 8))
    return BatchedDataDict(
        ids=column("ids", "int64", width),
        logprobs=column("logprobs", "float32", width),
        hidden=column("hidden", "bfloat16", width, 112),
        response=RaggedTensor(RTensor(values), lengths.tolist()),
    )


def test_sharding_ten_gigabytes_of_handles_takes_no_memory_and_no_read():
    batch = made_up_batch()
    assert batch.size_bytes > 10e9
    order = torch.randperm(batch.size)[:-7]
    tracemalloc.start()
    try:
        shards = batch.select_indices(order).shard_by_batch_size(64, allow_uneven_shards=True).shards
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20
    assert {shard.size for shard in shards} == {319, 320}
    assert sum(len(shard["response"]) for shard in shards) == len(order)
    wanted = batch["response"].lengths[order]
    assert torch.equal(torch.cat([shard["response"].lengths for shard in shards]), wanted)
    assert len(pickle.dumps(shards)) < 8 << 20
