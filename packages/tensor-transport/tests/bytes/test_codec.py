import json
import pickle

import numpy as np
import pytest
import torch
from batches import assert_same, read_only_copy, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raycrew.tensor_transport import (
    BatchedDataDict,
    BatchSchemaError,
    DecodeError,
    PackedTensor,
    RaggedTensor,
    SourceChangedError,
    UnsupportedTensorError,
)
from raycrew.tensor_transport._bytes.arenas import Slot, arrange, locate
from raycrew.tensor_transport._bytes.codec import check_size, decode, encode
from raycrew.tensor_transport._bytes.memory import TORCH_DTYPES, flat_memory, tensor_bytes, tensor_over

SHAPES = [(), (0,), (1,), (3, 0, 2), (5, 3)]


def random_tensor(dtype, shape, seed=0):
    count = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, count, dtype=np.uint8)
    return tensor_over(data, dtype, shape)


def shared(encoded):
    """The buffers as another process finds them: read-only."""
    return [np.frombuffer(read_only_copy(buffer), np.uint8) for buffer in encoded.buffers]


def freed():
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    return tensor


class TestTensors:
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("dtype", TORCH_DTYPES)
    def test_every_dtype_and_shape(self, dtype, shape):
        tensor = random_tensor(TORCH_DTYPES[dtype], shape)
        for buffers in (encode(tensor).buffers, shared(encode(tensor))):
            assert same(decode(encode(tensor).header, buffers), tensor)

    def test_layouts_are_made_contiguous(self):
        base = torch.arange(24.0).view(4, 6)
        for tensor in (base.t(), base[:, ::2], base[1].expand(3, 6), base.flip(0), torch.ones(2).conj()):
            assert same(decode(*parts(tensor)), tensor.contiguous())
        z = torch.tensor([1 + 2j])
        assert same(decode(*parts(z.conj())), torch.tensor([1 - 2j]))
        assert same(decode(*parts(z.conj().imag)), torch.tensor([-2.0]))

    def test_a_view_sends_only_its_own_bytes(self):
        tensor = torch.arange(1_000_000)[10:20]
        assert encode(tensor).size_bytes < 1000
        assert same(decode(*parts(tensor)), tensor.clone())

    def test_the_same_memory_is_sent_once(self):
        tensor = torch.ones(100_000)
        encoded = encode([tensor, {"again": tensor.view(100, 1000)}, tensor.detach()])
        assert sum(b.nbytes for b in encoded.buffers) == tensor.nbytes
        first, second, third = decode(encoded.header, shared(encoded))
        first.zero_()  # received apart, they no longer share memory
        assert second["again"].eq(1).all()
        assert third.equal(tensor)

    @pytest.mark.parametrize("size", [3, 100_000])
    def test_what_follows_memory_that_is_sent_once_arrives(self, size):
        value = [one := torch.ones(size), one, other := torch.zeros(size), one, other]
        encoded = encode(value)
        assert encoded.size_bytes < 3 * max(one.nbytes, 1000)
        assert same(decode(encoded.header, shared(encoded)), value)

    def test_what_needs_a_gradient_arrives_as_data(self):
        tensor = torch.ones(3, requires_grad=True)
        result = decode(*parts(tensor * 2))
        assert same(result, torch.full((3,), 2.0))
        assert not result.requires_grad

    @pytest.mark.parametrize(
        ("tensor", "message"),
        [
            (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantised"),
            (torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
            (torch.ones(3, device="meta"), "meta tensor has no data"),
            (torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), "NestedTensor"),
            (freed(), "memory was freed"),
        ],
        ids=["quantised", "sparse", "meta", "nested", "freed"],
    )
    def test_what_has_no_plain_bytes_is_refused_by_name(self, tensor, message):
        with pytest.raises(UnsupportedTensorError, match=message):
            tensor_bytes(tensor, "column 'x'")
        with pytest.raises(UnsupportedTensorError, match=message):
            encode({"x": tensor})
        with pytest.raises(UnsupportedTensorError, match=message):
            flat_memory(tensor)
        if tensor.device.type != "meta" and not tensor.is_nested and tensor.layout == torch.strided:
            with pytest.raises(BatchSchemaError, match=f"column 'x'.*{message}"):
                BatchedDataDict(x=tensor)

    @pytest.mark.gpu
    def test_a_gpu_tensor_arrives_on_the_cpu(self):
        tensor = torch.arange(5, device="cuda")
        assert same(decode(*parts(tensor)), tensor.cpu())


def parts(value):
    encoded = encode(value)
    return encoded.header, encoded.buffers


class TestObjects:
    def test_tensors_at_any_depth(self):
        value = {
            "a": [torch.ones(2), (np.arange(3), {"b": torch.zeros(0)})],
            "c": BatchedDataDict(x=[torch.ones(1)]),
        }
        result = decode(*parts(value))
        assert same(result["a"], value["a"])
        assert_same(result["c"], value["c"])

    def test_instances_with_tensors(self):
        class Holder:
            def __init__(self):
                self.weight = torch.ones(3)

        import ray.cloudpickle  # noqa: F401 - local classes need it

        assert same(decode(*parts(Holder())).weight, torch.ones(3))

    def test_arrays_lie_in_place(self):
        encoded = encode(np.arange(100_000))
        buffers = shared(encoded)
        result = decode(encoded.header, buffers)
        assert not result.flags.writeable
        assert np.shares_memory(result, buffers[0])

    def test_many_small_tensors_become_one_buffer(self):
        tensors = [torch.full((8192,), i, dtype=torch.float32) for i in range(500)]
        encoded = encode(tensors)
        assert len(encoded.buffers) == 1
        assert same(decode(encoded.header, shared(encoded)), tensors)

    def test_tensors_over_writable_buffers_lie_in_them(self):
        encoded = encode(torch.ones(10))
        result = decode(encoded.header, encoded.buffers)
        assert result.data_ptr() == encoded.buffers[0].ctypes.data

    @given(st.binary(max_size=60))
    def test_other_bytes_are_no_header(self, data):
        with pytest.raises(DecodeError):
            decode(data, [])

    def test_truncated(self):
        header, buffers = parts([torch.ones(3), "x"])
        for magic in (b"rct0", b"rct2", b"a", b"z"):
            with pytest.raises(DecodeError, match="not the header of an encoded object"):
                decode(magic + header[len(magic) :], buffers)
        for end in range(len(header) - 1):
            with pytest.raises(DecodeError):
                decode(header[:end], buffers)
        with pytest.raises(DecodeError, match="do not exist"):
            decode(header, [buffers[0][:5]])
        with pytest.raises(DecodeError, match="do not exist"):
            decode(header, [])

    @pytest.mark.hostile
    @pytest.mark.parametrize("shape", [(2, 2), (7,), (5,), (-1, -6), (-6,), (True, 6), (6.0,), ("6",)])
    def test_only_a_shape_that_fits_the_bytes_is_one(self, shape):
        data = np.zeros(12, np.uint8)
        for fits in ((6,), (2, 3), (1, 6, 1)):
            check_size(data, 2, fits)
        with pytest.raises(DecodeError, match=r"is not a shape|needs \d+ bytes, got 12"):
            check_size(data, 2, shape)


class TestSnapshotAndBorrow:
    @pytest.mark.parametrize("wrap", [lambda t: [t], lambda t: BatchedDataDict(x=t)], ids=["list", "batch"])
    def test_a_snapshot_does_not_see_later_writes(self, wrap):
        tensor = torch.ones(1000, 100)
        encoded = encode(wrap(tensor))
        tensor.zero_()
        encoded.check_unchanged()
        result = decode(encoded.header, encoded.buffers)
        assert (result[0] if isinstance(result, list) else result["x"]).eq(1).all()

    @pytest.mark.parametrize(
        "lend",
        [
            lambda t: encode([t], borrow=True),
            lambda t: encode({"deep": BatchedDataDict(x=t)}, borrow=True),
            lambda t: BatchedDataDict(x=t).encode(borrow=True),
            lambda t: BatchedDataDict(x=[{"t": t}]).encode(borrow=True),
            lambda t: BatchedDataDict(x=RaggedTensor(t, [len(t)])).encode(borrow=True),
        ],
    )
    def test_a_write_to_a_lent_tensor_is_seen(self, lend):
        tensor = torch.ones(1000, 100)
        encoded = lend(tensor)
        assert any(buffer.ctypes.data == tensor.data_ptr() for buffer in encoded.buffers)
        encoded.check_unchanged()
        tensor[3, 4] = 2
        with pytest.raises(SourceChangedError, match=r"shape \(1000, 100\) was written to"):
            encoded.check_unchanged()

    def test_what_is_small_or_no_tensor_is_never_lent(self):
        small, array = torch.ones(3), np.ones(100_000)
        encoded = encode([small, array], borrow=True)
        small.zero_()
        array[:] = 0
        encoded.check_unchanged()
        assert decode(encoded.header, encoded.buffers)[1].all()

    def test_inference_tensors_are_not_lent(self):
        with torch.inference_mode():
            tensor = torch.ones(1000, 100)
        with pytest.raises(UnsupportedTensorError, match="inference-mode"):
            encode(tensor, borrow=True)
        assert encode(tensor).size_bytes > 400_000


class TestArenas:
    @given(st.lists(st.integers(0, 300), max_size=40), st.integers(1, 300))
    def test_arranged_runs_are_found_again(self, sizes, large):
        runs = [np.random.default_rng(i).integers(0, 256, n, dtype=np.uint8) for i, n in enumerate(sizes)]
        slots, buffers = arrange(runs, large_bytes=large)
        assert [r.tolist() for r in locate(slots, buffers)] == [r.tolist() for r in runs]
        assert all(slot.offset % 64 == 0 for slot in slots)
        assert len(buffers) <= 1 + sum(n >= large for n in sizes)
        for run, slot in zip(runs, slots, strict=True):
            if run.nbytes >= large:
                assert buffers[slot.buffer] is run

    def test_arenas_are_bounded(self, monkeypatch):
        monkeypatch.setattr("raycrew.tensor_transport._bytes.arenas.ARENA_BYTES", 256)
        runs = [np.full(100, i, np.uint8) for i in range(10)]
        slots, buffers = arrange(runs)
        assert max(buffer.nbytes for buffer in buffers) <= 256
        assert [r[0] for r in locate(slots, buffers)] == list(range(10))

    def test_an_arena_is_at_most_64_mib(self):
        memory = np.zeros((300, 250 * 1024), np.uint8)
        slots, buffers = arrange(list(memory))
        assert max(buffer.nbytes for buffer in buffers) <= 64 << 20
        assert len(slots) == 300 and len(buffers) == 2

    @pytest.mark.hostile
    @pytest.mark.parametrize(
        ("slot", "exists"),
        [
            *(((0, 0, 10), True), ((1, 0, 4), True), ((0, 10, 0), True), ((1, 3, 1), True)),
            *(((2, 0, 1), False), ((-1, 0, 1), False), ((0, -1, 1), False), ((1, 2, -1), False)),
            *(((1, 3, 2), False), ((0, 11, 0), False)),
        ],
    )
    def test_only_bytes_that_exist_are_found(self, slot, exists):
        buffers = [np.arange(10, dtype=np.uint8), np.arange(4, dtype=np.uint8)]
        buffer, offset, size = slot
        if exists:
            (found,) = locate([Slot(*slot)], buffers)
            assert found.tolist() == list(range(offset, offset + size))
        else:
            match = (
                rf"bytes {offset}\.\.{offset + size} of buffer {buffer} do not exist; buffers hold \[10, 4\]"
            )
            with pytest.raises(DecodeError, match=match):
                locate([Slot(*slot)], buffers)


# Generated schemas

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
dtypes = st.sampled_from(
    [TORCH_DTYPES[n] for n in ("bfloat16", "float32", "int64", "bool", "float8_e4m3fn", "int16")]
)
tensors = st.builds(
    random_tensor, dtypes, st.lists(st.integers(0, 3), max_size=2).map(tuple), st.integers(0, 1000)
)
objects = st.recursive(
    leaves | tensors,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


def column(rows):
    inner = st.lists(st.integers(0, 3), max_size=2).map(tuple)
    lengths = st.lists(st.integers(0, 4), min_size=rows, max_size=rows)
    numpy_dtypes = st.sampled_from(["<f4", "<i8", "|b1", "<U3", "<M8[ns]", "<c8"])
    return st.one_of(
        st.builds(lambda d, i, s: random_tensor(d, (rows, *i), s), dtypes, inner, st.integers(0, 1000)),
        st.builds(
            lambda d, n, s: RaggedTensor(random_tensor(d, (sum(n), 2), s), n),
            dtypes,
            lengths,
            st.integers(0, 99),
        ),
        st.builds(
            lambda n, holes: PackedTensor(
                [None if hole else torch.full((2, k), k) for k, hole in zip(n, holes, strict=True)], 1
            ),
            lengths,
            st.lists(st.booleans(), min_size=rows, max_size=rows),
        ),
        st.builds(lambda d, i: np.zeros((rows, *i), d), numpy_dtypes, inner),
        st.lists(objects, min_size=rows, max_size=rows),
        st.lists(st.integers() | st.text(max_size=3), min_size=rows, max_size=rows).map(
            lambda items: np.array([*items, None], dtype=object)[:-1]
        ),
    )


@st.composite
def batches(draw):
    rows = draw(st.integers(0, 5))
    keys = draw(st.lists(st.text(max_size=4), unique=True, max_size=5))
    return BatchedDataDict(
        {key: draw(column(rows)) for key in keys},
        metadata=draw(st.dictionaries(st.text(max_size=3), objects, max_size=2)),
    )


class TestGeneratedSchemas:
    @given(batches())
    def test_encode_then_decode(self, batch):
        encoded = batch.encode()
        assert_same(BatchedDataDict.decode(encoded.header, encoded.buffers, allow_pickle=True), batch)
        assert_same(BatchedDataDict.decode(encoded.header, shared(encoded), allow_pickle=True), batch)
        assert_same(pickle.loads(pickle.dumps(batch)), batch)

    @given(batches(), st.integers(1, 6))
    def test_shard_then_concat(self, batch, parts):
        assert_same(BatchedDataDict.concat(batch.shard(parts)), batch)

    @given(batches(), st.randoms(use_true_random=False))
    def test_reorder_then_inverse(self, batch, random):
        order = list(range(batch.size))
        random.shuffle(order)
        assert_same(batch.select_indices(order).reorder_data(order), batch)

    @given(batches(), st.data())
    def test_selections_commute_with_the_wire(self, batch, data):
        encoded = batch.encode()
        received = BatchedDataDict.decode(encoded.header, shared(encoded), allow_pickle=True)
        rows = data.draw(st.lists(st.integers(0, batch.size - 1), max_size=6)) if batch.size else []
        assert_same(received.select_indices(rows), batch.select_indices(rows))
        start = data.draw(st.integers(0, batch.size))
        assert_same(received.slice(start, batch.size), batch.slice(start, batch.size))

    @given(batches())
    def test_a_repeated_batch_has_each_row_twice(self, batch):
        repeated = batch.repeat_interleave(2)
        for offset in (0, 1):
            assert_same(repeated.select_indices(range(offset, 2 * batch.size, 2)), batch)


def plain_batch():
    return BatchedDataDict(
        {
            "x": torch.ones(3, 4),
            "r": RaggedTensor(torch.arange(6), [1, 2, 3]),
            "p": PackedTensor([torch.ones(2, 1), None, torch.ones(2, 3)], 1),
            "n": np.ones(3, np.float32),
        }
    )


class TestUntrustedBytes:
    """Whatever the bytes are, without pickle the decoder raises DecodeError or gives a sound batch."""

    def decoded(self, header, buffers):
        try:
            batch = BatchedDataDict.decode(header, buffers)
        except DecodeError:
            return
        for key in batch:
            assert type(key) is str
        assert_same(pickle.loads(pickle.dumps(batch)), batch)

    @settings(max_examples=500, suppress_health_check=[HealthCheck.too_slow])
    @given(st.data())
    def test_damaged_bytes(self, data):
        encoded = plain_batch().encode()
        header = bytearray(encoded.header)
        for _ in range(data.draw(st.integers(1, 4))):
            header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
        self.decoded(bytes(header[: data.draw(st.integers(0, len(header)))]), encoded.buffers)
        self.decoded(bytes(header), encoded.buffers)
        random_buffers = [
            np.frombuffer(data.draw(st.binary(max_size=400)), np.uint8) for _ in encoded.buffers
        ]
        self.decoded(encoded.header, random_buffers)

    json_values = st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-3, 2**70)
        | st.floats()
        | st.sampled_from(["x", "float32", "|O", "tensor"]),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["format", "rows"]), inner)
        ),
        max_leaves=5,
    )

    @settings(max_examples=500, suppress_health_check=[HealthCheck.too_slow])
    @given(st.data())
    def test_damaged_schemas(self, data):
        encoded = plain_batch().encode()
        header = json.loads(encoded.header)
        node, key = header, data.draw(st.sampled_from(sorted(header)))
        while isinstance(node[key], list) and node[key] and data.draw(st.integers(0, 4)):
            node, key = node[key], data.draw(st.integers(0, len(node[key]) - 1))
        node[key] = data.draw(self.json_values)
        self.decoded(json.dumps(header).encode(), encoded.buffers)

    def test_pickles_are_refused_unless_allowed(self):
        for batch in (BatchedDataDict(x=["a"]), BatchedDataDict(x=torch.ones(1), metadata={"a": 1})):
            encoded = batch.encode()
            with pytest.raises(DecodeError, match="allow_pickle"):
                BatchedDataDict.decode(encoded.header, encoded.buffers)

    def test_another_version_is_refused(self):
        encoded = plain_batch().encode()
        with pytest.raises(DecodeError, match=r"encoded as 'raycrew.columns/9'"):
            BatchedDataDict.decode(encoded.header.replace(b"columns/1", b"columns/9"), encoded.buffers)

    def test_ragged_offsets_are_checked(self):
        encoded = BatchedDataDict(r=RaggedTensor(torch.arange(6), [1, 2, 3])).encode()
        buffers = [buffer.copy() for buffer in encoded.buffers]
        buffers[0][64:72] = np.frombuffer(np.int64(7).tobytes(), np.uint8)
        with pytest.raises(DecodeError, match="do not fit values"):
            BatchedDataDict.decode(encoded.header, buffers)
