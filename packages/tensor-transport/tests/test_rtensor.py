import dataclasses
import pickle
from collections import namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import ProcessPeer

from raycrew.tensor_transport import BatchedDataDict, BatchSchemaError, TransportError
from raycrew.tensor_transport._handles.registry import ShardRegistry
from raycrew.tensor_transport._handles.walk import collect_shards, flatten_shard_ids, localize, remotize
from raycrew.tensor_transport._rows.shards import TensorShardInfo
from raycrew.tensor_transport.backends.inline import InlineBackend
from raycrew.tensor_transport.backends.shared_memory import SharedMemoryBackend
from raycrew.tensor_transport.errors import ShardLostError, UnsupportedTensorError
from raycrew.tensor_transport.protocols import RowHandle, ShardBackend
from raycrew.tensor_transport.rtensor import RTensor
from raycrew.tensor_transport.testing import BackendCase, InProcessBackend, check_shard_backend


@pytest.fixture
def registry():
    return ShardRegistry(InlineBackend())


def info(rows, name="s", shape=(4,), dtype="float32", **more):
    return TensorShardInfo("inline", name, "", "", dtype, (rows, *shape), **more)


def table(rows=12, columns=4):
    return torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)


@st.composite
def operations(draw):
    """A function that does the same to a tensor and to a handle."""
    kind = draw(st.sampled_from(["slice", "select", "repeat", "concat", "columns", "reorder", "split"]))
    numbers = draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=8))

    def apply(x):
        n, handle = len(x), isinstance(x, RTensor)
        if n == 0:
            return x
        if kind == "slice":
            start = numbers[0] % n
            stop = start + numbers[-1] % (n - start + 1)
            return x.slice(start, stop) if handle else x[start:stop]
        if kind == "select":
            index = [i % (2 * n) - n for i in numbers]
            return x.select(index) if handle else x[index]
        if kind == "repeat":
            return (x.repeat(2) if handle else x.repeat_interleave(2, 0)) if n < 40 else x
        if kind == "concat":
            half = n // 2
            if handle:
                return RTensor.concat([x.slice(half, n), x.slice(0, half), x.slice(0, 1)])
            return torch.cat([x[half:], x[:half], x[:1]])
        if kind == "columns":
            start = numbers[0] % x.shape[1] if x.shape[1] else 0
            return x.columns(start, x.shape[1]) if handle else x[:, start:]
        if kind == "reorder":
            order = torch.randperm(n, generator=torch.Generator().manual_seed(numbers[0]))
            return x.reorder(order) if handle else x[order]
        return (x.split(3) if handle else list(torch.tensor_split(x, 3)))[numbers[0] % 3]

    return apply


@pytest.mark.smoke
@settings(max_examples=200)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.lists(operations(), max_size=5))
def test_a_handle_does_what_its_tensor_would(sizes, chain):
    backend = InProcessBackend()
    registry = ShardRegistry(backend)
    parts = [torch.randn(size, 5, 2) for size in sizes]
    handle, tensor = RTensor.concat(registry.put(parts)), torch.cat(parts)
    for operation in chain:
        handle, tensor = operation(handle), operation(tensor)
        assert handle.shape == tensor.shape and handle.data.shape == tensor.shape
    assert backend.fetches == 0, "an operation on handles reads nothing"
    (fetched,) = registry.fetch([pickle.loads(pickle.dumps(handle))])
    assert torch.equal(fetched, tensor)
    fetched.fill_(7)
    assert torch.equal(torch.cat(registry.fetch(registry.put(parts))), torch.cat(parts))


def test_shape_dtype_and_data():
    handle = RTensor([info(3, "a"), info(2, "b")])
    assert handle.shape == (5, 4) and handle.dtype == torch.float32 and len(handle) == 5
    assert handle.nbytes == 80 and handle.ndim == 2
    assert handle.data.is_meta and handle.data.shape == (5, 4)
    assert repr(handle) == "RTensor(float32[5, 4], 2 shards: inline)"
    with pytest.raises(ValueError, match="2 shards"):
        _ = handle.shard
    assert RTensor(info(3), data=torch.empty(3, 4, device="meta")).shard.rows == 3
    with pytest.raises(ValueError, match=r"float32\[2, 4\]"):
        RTensor(info(3), data=torch.empty(2, 4, device="meta"))


def test_shards_without_rows_are_dropped():
    handle = RTensor([info(3, "a"), info(2, "b"), info(4, "c")])
    assert flatten_shard_ids(handle[3:5]) == ["b"]
    assert flatten_shard_ids([handle[[8, 0]], {"x": handle[:1]}]) == ["a", "c"]
    assert collect_shards({"no": "handles"}) == []


def test_a_shard_that_comes_again_counts_once():
    one, other = RTensor(info(3, "a")), RTensor([info(2, "b"), info(3, "a")])
    joined = RTensor.concat([one, other, one])
    assert [shard.shard_id for shard in joined.shards] == ["a", "b"] and len(joined) == 11


@pytest.mark.parametrize(
    ("act", "error", "match"),
    [
        (lambda h: h.slice(0, 6), IndexError, r"rows 0\.\.6 are not within the 5 rows"),
        (lambda h: h[[5]], IndexError, "row 5 is out of range"),
        (lambda h: h[2], TypeError, "wrap it in a list"),
        (lambda h: h[:, ::2], TypeError, r"\[rows, a:b\]"),
        (lambda h: h.reorder([0, 1, 2, 3, 3]), ValueError, "not a permutation"),
        (lambda h: h.repeat(0), ValueError, "times=0"),
        (lambda h: h.split([2, 2]), ValueError, r"sizes \[2, 2\] do not add up to 5"),
        (lambda h: h.columns(2, 5), IndexError, r"columns 2\.\.5"),
        (lambda h: RTensor.concat([]), ValueError, "no handle"),
        (lambda h: RTensor([]), ValueError, "at least one shard"),
        (lambda h: RTensor.concat([h, h.columns(0, 2)]), ValueError, "do not join"),
        (lambda h: RTensor([info(1, "a"), info(1, "b", dtype="int64")]), ValueError, r"int64\[1, 4\]"),
        (lambda h: RTensor([info(1, "a"), info(1, "b", shape=(5,))]), ValueError, "do not make one tensor"),
    ],
)
def test_bad_operations(act, error, match):
    with pytest.raises(error, match=match):
        act(RTensor([info(3, "a"), info(2, "b")]))


@dataclasses.dataclass(frozen=True)
class Sample:
    tokens: object
    reward: float


Pair = namedtuple("Pair", "a b")


def test_remotize_and_localize_walk_containers(registry):
    value = {
        "list": [torch.ones(3), "text", 4],
        "tuple": (torch.zeros(2, dtype=torch.bfloat16),),
        "named": Pair(torch.arange(5), None),
        "sample": Sample(torch.eye(2), 0.5),
        "scalar": torch.tensor(3.0),
        "untouched": {"deep": [1, 2]},
        "batch": BatchedDataDict(ids=torch.arange(6).reshape(3, 2), text=["a", "b", "c"], metadata={"k": 1}),
    }
    remote = remotize(value, registry)
    assert isinstance(remote["list"][0], RTensor) and isinstance(remote["named"].a, RTensor)
    assert isinstance(remote["sample"].tokens, RTensor) and isinstance(remote["batch"]["ids"], RTensor)
    assert remote["scalar"] is value["scalar"] and remote["untouched"] is value["untouched"]
    assert isinstance(value["list"][0], torch.Tensor), "the original is not changed"
    local = localize(pickle.loads(pickle.dumps(remote)), registry)
    assert torch.equal(local["list"][0], torch.ones(3)) and local["list"][1:] == ["text", 4]
    assert local["tuple"][0].dtype == torch.bfloat16
    assert torch.equal(local["named"].a, torch.arange(5)) and local["named"].b is None
    assert torch.equal(local["sample"].tokens, torch.eye(2)) and local["sample"].reward == 0.5
    batch = local["batch"]
    assert torch.equal(batch["ids"], torch.arange(6).reshape(3, 2))
    assert batch["text"] == ["a", "b", "c"] and batch.metadata == {"k": 1}
    assert localize({"nothing": 1}, registry) == {"nothing": 1}


def test_min_bytes_leaves_small_tensors(registry):
    remote = remotize([torch.ones(3), torch.ones(300)], registry, min_bytes=1000)
    assert isinstance(remote[0], torch.Tensor) and isinstance(remote[1], RTensor)


def test_one_handle_in_two_places_is_fetched_once():
    backend = InProcessBackend()
    registry = ShardRegistry(backend)
    handle = registry.put([torch.arange(4)])[0]
    a, b = localize([handle, handle], registry)
    assert a is b and backend.reads == 1


def test_a_batch_of_handles_is_sharded_without_data(registry):
    ids, lengths = table(10, 3), torch.arange(10)
    batch = remotize(BatchedDataDict(ids=ids, lengths=lengths, metadata={"step": 3}), registry)
    order = torch.randperm(10)
    shards = batch.select_indices(order).shard(4)
    assert all(isinstance(shard["ids"], RTensor) for shard in shards)
    local = [localize(shard, registry) for shard in shards]
    assert torch.equal(torch.cat([shard["ids"] for shard in local]), ids[order])
    assert torch.equal(torch.cat([shard["lengths"] for shard in local]), order)
    assert [shard.metadata for shard in local] == [{"step": 3}] * 4
    joined = BatchedDataDict.from_batches(shards)
    assert isinstance(joined["ids"], RTensor)
    assert torch.equal(localize(joined, registry)["ids"], ids[order])
    assert isinstance(joined["ids"], RowHandle)


@pytest.mark.parametrize(("left", "right"), [(0, 3), (2, 0), (2, 3)])
@pytest.mark.hostile
def test_padding_is_trimmed_and_restored(left, right):
    backend = InProcessBackend()
    registry = ShardRegistry(backend)
    mask = torch.zeros(4, left + 5 + right, dtype=torch.int64)
    mask[:, left : left + 5] = 1
    mask[0, left + 3 :] = 0
    ids = torch.where(mask > 0, torch.randint(1, 9, mask.shape), 99)
    scores = torch.where(mask > 0, torch.rand(mask.shape), 0.5)
    sample = {"ids": ids, "attention_mask": mask, "scores": scores, "rewards": torch.ones(4)}
    remote = remotize(sample, registry, trim=True)
    assert {remote[name].shape for name in ("ids", "attention_mask", "scores")} == {(4, 5)}
    trimmed = localize(remote, registry)
    assert torch.equal(trimmed["ids"], ids[:, left : left + 5])
    for name, tensor in localize(remote, registry, pad=True).items():
        assert torch.equal(tensor, sample[name]), name


@pytest.mark.hostile
def test_trimmed_handles_of_different_widths_join():
    registry = ShardRegistry(InProcessBackend())
    samples = []
    for used in (3, 5):
        mask = torch.zeros(2, 8, dtype=torch.int64)
        mask[:, :used] = 1
        samples.append({"ids": mask * 7 - (1 - mask), "attention_mask": mask})
    remote = [remotize(sample, registry, trim=True) for sample in samples]
    joined = RTensor.concat([r["ids"] for r in remote])
    assert joined.shape == (4, 5)
    want = torch.cat([sample["ids"] for sample in samples])
    assert torch.equal(registry.fetch([joined])[0], want[:, :5])
    assert torch.equal(registry.fetch([joined.padded()])[0], want)
    assert torch.equal(registry.fetch([joined[[3, 0], 2:5]])[0], want[[3, 0], 2:5])


def test_into_a_buffer_of_the_caller():
    registry = ShardRegistry(InProcessBackend())
    handle = RTensor.concat(registry.put([table(), table() + 100]))
    buffer = torch.empty(24, 4)
    (out,) = registry.fetch([handle], into=[buffer])
    assert out is buffer and torch.equal(buffer, torch.cat([table(), table() + 100]))
    with pytest.raises(ValueError, match=r"`into` is float32\[3\]"):
        registry.fetch([handle], into=[torch.empty(3)])
    with pytest.raises(ValueError, match="2 tensors in `into` for 1 handles"):
        registry.fetch([handle], into=[None, None])


def test_only_needed_rows_and_one_request():
    backend = InProcessBackend()
    registry = ShardRegistry(backend)
    handles = registry.put([table(1000), table(1000)])
    registry.fetch([RTensor.concat(handles)[[3, 1500, 4]], handles[0][:2]])
    assert backend.fetches == 1
    assert backend.rows_read == 5


def test_the_cache_is_bounded_and_never_shows_a_write():
    backend = InProcessBackend()
    registry = ShardRegistry(backend, cache_bytes=500)
    a, b, c = registry.put([table(), table() + 1, table() + 2])
    for _ in range(3):
        (got,) = registry.fetch([a])
        assert torch.equal(got, table())
        got.fill_(-1)
    assert backend.reads == 1
    assert registry.cache_stats.hits == 2
    registry.fetch([b, c])
    assert registry.cache_stats.held_bytes <= 500 and registry.cache_stats.shards == 2
    registry.fetch([a])
    assert backend.reads == 4, "the least recently used one was dropped"
    registry.release(collect_shards(a))
    with pytest.raises(TransportError):
        registry.fetch([a])


def test_a_replica_is_read_when_the_first_place_is_gone():
    first, second = InProcessBackend("first"), InProcessBackend("second")
    registry = ShardRegistry(first, second)
    original, copy = first.put([table()])[0], second.put([table()])[0]
    handle = RTensor(dataclasses.replace(original, replicas=(copy,)))
    first.release([original])
    assert torch.equal(registry.fetch([handle[2:4]])[0], table()[2:4])
    second.release([copy])
    with pytest.raises(ShardLostError, match="so are its 1 replicas"):
        registry.fetch([handle])


def test_registry_arguments_and_unknown_schemes():
    with pytest.raises(ValueError, match="at least one"):
        ShardRegistry()
    with pytest.raises(ValueError, match="one backend for each scheme"):
        ShardRegistry(InlineBackend(), InlineBackend())
    with pytest.raises(ValueError, match="inline_bytes needs"):
        ShardRegistry(InlineBackend(), inline_bytes=3)
    with pytest.raises(TransportError, match="no backend for the scheme 'inline'"):
        ShardRegistry(InProcessBackend()).fetch([RTensor(info(3))])


def test_small_tensors_go_inline():
    backend = InProcessBackend()
    registry = ShardRegistry(backend, inline=InlineBackend(), inline_bytes=100)
    small, large = registry.put([torch.ones(3), torch.ones(300)])
    assert (small.shard.scheme, large.shard.scheme) == ("inline", "memory")
    assert [t.numel() for t in registry.fetch([small, large])] == [3, 300]
    assert backend.stats().shards == 1


def test_step_leases_and_leaks_show_in_stats():
    registry = ShardRegistry(InProcessBackend())
    for step in range(4):
        registry.put([table(), table()], step=step)
    stats = registry.stats()["memory"]
    assert (stats.shards, stats.oldest_step, stats.held_bytes) == (8, 0, 8 * 192)
    assert registry.expire(before_step=3) == 6
    stats = registry.stats()["memory"]
    assert (stats.shards, stats.oldest_step, stats.peak_bytes) == (2, 3, 8 * 192)
    registry.expire(before_step=4)
    assert registry.stats()["memory"].held_bytes == 0


def test_unsupported_tensors_are_refused_by_name(registry):
    with pytest.raises(UnsupportedTensorError):
        remotize([torch.eye(2).to_sparse()], registry)


def test_backends_fit_their_protocol():
    assert isinstance(InlineBackend(), ShardBackend)
    assert isinstance(InProcessBackend(), ShardBackend)


def test_inline_conforms():
    backend = InlineBackend()
    check_shard_backend(BackendCase(backend, lambda: ProcessPeer(backend), True, False))


class TestOrders:
    def test_one_undoes_the_other(self, registry):
        handle, order = registry.put([table()])[0], [3, 0, 11, *range(4, 11), 1, 2]
        tensor = registry.fetch([handle.apply_order(order)])[0]
        assert tensor.equal(table()[order])
        assert registry.fetch([handle.undo_order(order)])[0][order].equal(table())
        assert handle.apply_order(order).undo_order(order) == handle
        assert handle.reorder(order) == handle.apply_order(order)
        with pytest.raises(ValueError, match="not a permutation"):
            handle.undo_order([0, 0])


class TestEquality:
    def test_by_rows_of_shards_whatever_way_they_were_chosen(self, registry):
        one, other = registry.put([table(), table()])
        assert one == RTensor(one.shard) and hash(one) == hash(RTensor(one.shard))
        assert pickle.loads(pickle.dumps(one)) == one
        assert one != other
        assert RTensor.concat(one.split(3)) == one
        assert RTensor.concat([other, one]).slice(12, 24) == one
        assert RTensor.concat([one, other]) != RTensor.concat([other, one])
        assert one[[1, 0]] != one[[0, 1]]
        assert one[:, 1:] != one[:, :-1]
        assert one[:0] == one[5:5]
        assert one != table()


def trimmed(registry, used, width, *, left=False, pad=-1):
    """Ids of one row with their padding, and the handle of what is stored of them."""
    mask = torch.zeros(1, width, dtype=torch.int64)
    mask[:, width - used if left else 0 : None if left else used] = 1
    ids = torch.where(mask > 0, torch.arange(1, width + 1), pad)
    return ids, remotize({"ids": ids, "attention_mask": mask}, registry, trim=True)["ids"]


@pytest.mark.hostile
@pytest.mark.parametrize(("left", "used"), [(True, 4), (True, 6), (True, 8), (False, 8)])
def test_handles_of_other_widths_do_not_join_where_padding_may_be_on_the_left(left, used):
    registry = ShardRegistry(InProcessBackend())
    (_, a), (_, b) = trimmed(registry, 4, 10, left=left), trimmed(registry, used, 8, left=left)
    with pytest.raises(ValueError, match="of 8 and 10 do not join"):
        RTensor.concat([a, b])
    with pytest.raises(ValueError, match="columns do not make one tensor"):
        RTensor([a.shard, b.shard])
    with pytest.raises(BatchSchemaError, match=r"column 'ids'.*do not join"):
        BatchedDataDict.from_batches([{"ids": a}, {"ids": b}])


@pytest.mark.hostile
@pytest.mark.parametrize("used", [1, 4, 6])
def test_handles_of_other_widths_join_where_their_padding_is_on_the_right(used):
    registry = ShardRegistry(InProcessBackend())
    (ids, a), (other_ids, b) = trimmed(registry, 4, 10), trimmed(registry, used, 8, pad=-2)
    want = torch.cat([ids, torch.nn.functional.pad(other_ids, (0, 2), value=-2)])
    for joined in (RTensor.concat([a, b]), BatchedDataDict.from_batches([{"ids": a}, {"ids": b}])["ids"]):
        assert torch.equal(localize(joined, registry, pad=True), want)
        assert torch.equal(localize(joined[[1, 0]], registry, pad=True), want[[1, 0]])
        assert torch.equal(localize(joined, registry), want[:, : max(4, used)])
    both = RTensor([a.shard, b.shard])
    assert torch.equal(registry.fetch([both.padded()])[0], want)


@pytest.mark.hostile
def test_columns_that_were_cut_are_no_padding():
    registry = ShardRegistry(InProcessBackend())
    ids, handle = trimmed(registry, 6, 10)
    for part, want in [
        (handle.truncate_columns(4), ids[:, :4]),
        (handle.truncate_columns(8), ids[:, :8]),
        (handle.truncate_columns(6), ids[:, :6]),
        (handle.truncate_columns(12), ids),
        (handle[:, 1:4], ids[:, 1:4]),
        (handle[:, :], ids),
        (handle.padded()[:, :8], ids[:, :8]),
        (handle.padded()[:, 3:9], ids[:, 3:9]),
        (handle[:, :0], ids[:, :0]),
    ]:
        restored = pickle.loads(pickle.dumps(part))
        assert torch.equal(localize(restored, registry, pad=True), want), part
        assert torch.equal(registry.fetch([part.padded().padded()])[0], want)
    _, left = trimmed(registry, 6, 10, left=True)
    assert left.truncate_columns(4).padded().columns_range == (4, 8)
    assert left.truncate_columns(8).padded().columns_range == (4, 10)


@pytest.mark.hostile
def test_handles_that_were_cut_join_where_their_columns_are_the_same():
    registry = ShardRegistry(InProcessBackend())
    ids, handle = trimmed(registry, 6, 10)
    other_ids, other = trimmed(registry, 4, 10)
    with pytest.raises(ValueError, match="do not join"):
        RTensor.concat([handle[:, 2:5], other])
    with pytest.raises(ValueError, match=r"of 4 and 10 do not join"):
        RTensor.concat([handle.truncate_columns(4), other])
    with pytest.raises(ValueError, match=r"of 10 and cut ones do not join"):
        RTensor.concat([handle[:, 1:6], handle])
    for join, want in [
        ([handle[:, 2:4], other[:, 2:4]], torch.cat([ids, other_ids])[:, 2:4]),
        ([handle.truncate_columns(5), other.truncate_columns(5)], torch.cat([ids, other_ids])[:, :5]),
        ([handle.padded(), other], torch.cat([ids, other_ids])),
    ]:
        assert torch.equal(localize(RTensor.concat(join), registry, pad=True), want)


@pytest.mark.hostile
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_scattered_rows_of_several_shards_of_any_dtype(dtype):
    registry = ShardRegistry(InProcessBackend())
    ids = torch.arange(12, dtype=torch.uint8).repeat_interleave(dtype.itemsize).reshape(6, -1)
    handle = RTensor.concat(registry.put([ids[:4].view(dtype), ids[4:].view(dtype)]))
    rows = [5, 0, 3, 4, 0]
    assert torch.equal(registry.fetch([handle[rows]])[0].view(torch.uint8), ids[rows])


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("pad", "dtype"),
    [(-0.0, torch.float32), (2**64 - 1, torch.uint64), (7, torch.uint16), (1.5, torch.float16)],
)
@pytest.mark.parametrize("rows", [[0, 1], [1, 0]])
def test_padding_comes_back_as_the_very_bytes(pad, dtype, rows):
    registry = ShardRegistry(InProcessBackend())
    mask = torch.tensor([[0, 1, 0, 0]])
    values = torch.full((1, 4), pad, dtype=dtype)
    values[:, 1] = 3
    stored = [remotize({"x": values, "attention_mask": mask}, registry, trim=True)["x"] for _ in range(2)]
    assert stored[0].shape == (1, 1)
    restored = RTensor.concat(stored)[rows].localize(pad=True)
    assert torch.equal(restored.view(torch.uint8), torch.cat([values, values]).view(torch.uint8))


@pytest.mark.parametrize("zeros", [[0.0, -0.0], [-0.0, 0.0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_zeros_of_two_signs_are_padding_that_comes_back_as_zeros(zeros, dtype):
    registry = ShardRegistry(InProcessBackend())
    values = torch.tensor([[1.0, *zeros]]).to(dtype)
    stored = remotize({"x": values, "attention_mask": torch.tensor([[1, 0, 0]])}, registry, trim=True)["x"]
    assert stored.shape == (1, 1)
    padding = stored.localize(pad=True)[:, 1:].float()
    assert padding.tolist() == [[0, 0]] and not padding.signbit().any()


def test_padding_of_nan_is_none():
    registry = ShardRegistry(InProcessBackend())
    sample = {"x": torch.tensor([[1.0, torch.nan]]), "attention_mask": torch.tensor([[1, 0]])}
    assert remotize(sample, registry, trim=True)["x"].shape == (1, 2)


@pytest.mark.parametrize("rows", [slice(None), [0, 4, 1, 5]])
def test_parameters_are_filled_whichever_rows_are_fetched(rows):
    registry = ShardRegistry(InProcessBackend())
    handle = RTensor.concat(registry.put([table(3), table(3) + 100]))[rows]
    parameter = torch.nn.Parameter(torch.zeros(handle.shape))
    registry.fetch([handle], into=[parameter])
    assert torch.equal(parameter.detach(), torch.cat([table(3), table(3) + 100])[rows])


@pytest.mark.hostile
def test_a_tensor_that_cannot_be_filled_is_refused():
    registry = ShardRegistry(InProcessBackend())
    (handle,) = registry.put([torch.ones(2, 3, dtype=torch.complex64)])
    lazy = torch.zeros(2, 3, dtype=torch.complex64)
    for target in (lazy.conj(), torch.zeros_like(lazy, device="meta")):
        with pytest.raises(ValueError, match="can't be filled"):
            registry.fetch([handle], into=[target])
    (handle,) = registry.put([torch.ones(2, 3)])
    with pytest.raises(ValueError, match="can't be filled"):
        registry.fetch([handle], into=[lazy.conj().imag])


@pytest.mark.hostile
def test_microbatches_of_handles_stay_as_short_as_planned_when_they_are_padded():
    registry = ShardRegistry(InProcessBackend())
    lengths = torch.tensor([2, 6, 4, 6])
    mask = (torch.arange(10) < lengths[:, None]).long()
    batch = BatchedDataDict(ids=mask * 3 - 1, attention_mask=mask, lengths=lengths)
    remote = remotize(batch, registry, trim=True, only=lambda tensor: tensor.ndim == 2)
    arguments = {
        "max_tokens_per_microbatch": 8,
        "sequence_length_round": 1,
        "input_key": "ids",
        "input_lengths_key": "lengths",
    }
    (shard,) = remote.shard_by_batch_size(1, dynamic_batching_args=arguments).shards
    for part, length in zip(
        shard.make_microbatch_iterator_with_dynamic_shapes(), shard.micro_batch_lengths[0], strict=True
    ):
        local = localize(part, registry, pad=True)
        assert local["ids"].shape == local["attention_mask"].shape == (part.size, length)


@pytest.mark.hostile
@pytest.mark.parametrize("rows", [slice(None), slice(2, 9), [3, 20, 5]])
@pytest.mark.parametrize("kind", [InProcessBackend, SharedMemoryBackend])
def test_what_is_fetched_into_a_tensor_is_a_write_that_autograd_knows(kind, rows):
    registry = ShardRegistry(kind())
    handle = RTensor.concat(registry.put([table(), table() + 100]))[rows]
    saved, weight = torch.ones(len(handle), 4), torch.ones(4, requires_grad=True)
    loss = (saved * weight).sum()
    registry.fetch([handle], into=[saved])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    registry.close()
