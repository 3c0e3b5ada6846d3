import math
import pickle

import numpy as np
import pytest
import torch
from batches import read_only_copy, same
from hypothesis import given
from hypothesis import strategies as st

from raycrew.tensor_transport import BatchedDataDict, BatchSchemaError, PackedTensor, RaggedTensor
from raycrew.tensor_transport._columns.kinds.padding import check_pad_value, join, padded_to
from raycrew.tensor_transport._rows.indexing import normalize_rows

row_lengths = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def ragged_of(lengths, dtype=torch.bfloat16):
    return RaggedTensor.from_rows([torch.full((n, 2), i, dtype=dtype) for i, n in enumerate(lengths)])


def rows_of(ragged):
    return [row.tolist() for row in ragged]


class TestRagged:
    @given(row_lengths, st.sampled_from(["left", "right"]))
    def test_padding_and_back(self, lengths, side):
        ragged = ragged_of(lengths)
        padded = ragged.to_padded(9, pad_side=side, length=6)
        assert padded.shape == (len(lengths), 6, 2)
        assert padded.dtype == torch.bfloat16
        assert int((padded == 9).sum()) == 2 * (6 * len(lengths) - sum(lengths))
        back = RaggedTensor.from_padded(padded, lengths, pad_side=side)
        assert rows_of(back) == rows_of(ragged)
        assert ragged.to_padded().shape[1] == max(lengths)

    def test_sides(self):
        ragged = RaggedTensor.from_rows([torch.tensor([1]), torch.tensor([2, 3])])
        assert ragged.to_padded().tolist() == [[1, 0], [2, 3]]
        assert ragged.to_padded(pad_side="left").tolist() == [[0, 1], [2, 3]]

    @given(row_lengths, st.data())
    def test_rows_are_those_of_a_list(self, lengths, data):
        ragged = ragged_of(lengths)
        index = data.draw(
            st.lists(st.integers(-len(lengths), len(lengths) - 1), max_size=8) | st.slices(len(lengths))
        )
        listed = rows_of(ragged)
        expected = listed[index] if isinstance(index, slice) else [listed[i] for i in index]
        assert rows_of(ragged.take(normalize_rows(index, len(lengths)))) == expected

    @given(row_lengths, st.integers(0, 6))
    def test_truncate(self, lengths, longest):
        assert rows_of(ragged_of(lengths).truncate(longest)) == [
            row[:longest] for row in rows_of(ragged_of(lengths))
        ]

    def test_all_rows_together_are_found_by_one_count_of_where_they_are(self, monkeypatch):
        ragged, counts = ragged_of(range(5)), []
        offsets = RaggedTensor.offsets.fget
        monkeypatch.setattr(RaggedTensor, "offsets", property(lambda own: counts.append(own) or offsets(own)))
        assert rows_of(ragged) == [[[row] * 2] * row for row in range(5)]
        assert len(counts) == 1

    def test_runs_are_views(self):
        ragged = ragged_of([1, 2, 3])
        assert ragged.take(slice(1, 3, 1)).values.data_ptr() == ragged.values[1:].data_ptr()
        assert ragged[-1].data_ptr() == ragged.values[3:].data_ptr()

    def test_pickled_by_itself(self):
        ragged = ragged_of([1, 0, 3])
        buffers = []
        payload = pickle.dumps(ragged, protocol=5, buffer_callback=buffers.append)
        shared = [read_only_copy(buffer) for buffer in buffers]
        first, second = (pickle.loads(payload, buffers=shared) for _ in range(2))
        first.values.zero_()
        assert same(second, ragged)

    def test_what_does_not_fit(self):
        with pytest.raises(ValueError, match="3 elements in all do not fit values of shape"):
            RaggedTensor(torch.ones(4), [1, 2])
        with pytest.raises(ValueError, match="non-negative"):
            RaggedTensor(torch.ones(1), [2, -1])
        with pytest.raises(ValueError, match="no rows"):
            RaggedTensor.from_rows([])
        with pytest.raises(BatchSchemaError, match="does not join"):
            RaggedTensor.from_rows([torch.ones(1), torch.ones(1, dtype=torch.int64)])
        with pytest.raises(ValueError, match="a row of 3 does not fit a padded length of 2"):
            ragged_of([3]).to_padded(length=2)
        with pytest.raises(ValueError, match="do not fit a padded shape"):
            RaggedTensor.from_padded(torch.ones(2, 3), [4, 1])

    def test_as_a_column(self):
        batch = BatchedDataDict(x=ragged_of([3, 1, 2]), y=[0, 1, 2])
        assert rows_of(batch.select_indices([2, 0])["x"]) == [rows_of(batch["x"])[2], rows_of(batch["x"])[0]]
        assert batch.repeat_interleave(2)["x"].lengths.tolist() == [3, 3, 1, 1, 2, 2]
        assert batch.truncate_tensors(1, 2)["x"].lengths.tolist() == [2, 1, 2]
        assert batch.truncate_tensors(2, 1)["x"].values.shape == (5, 1)
        joined = BatchedDataDict.from_batches([batch, batch])
        assert joined["x"].lengths.tolist() == [2, 1, 2, 2, 1, 2]
        assert joined.to("meta")["x"].device.type == "meta"
        assert "RaggedTensor" in repr(joined)


class TestPacked:
    def images(self):
        return PackedTensor([torch.ones(2, 3), None, torch.full((1, 3), 5.0)], dim_to_pack=0)

    def test_joined_when_wanted(self):
        assert self.images().as_tensor().tolist() == [[1] * 3, [1] * 3, [5] * 3]
        assert PackedTensor.empty_like(self.images()).as_tensor() is None
        assert self.images().as_tensor(device="meta").shape == (3, 3)
        assert len(PackedTensor(torch.ones(4, 4), 0)) == 1

    def test_rows(self):
        images = self.images()
        assert [None if t is None else len(t) for t in images.slice([2, -2, 2])] == [1, None, 1]
        assert images.slice(torch.tensor([True, False, False]))[0] is images[0]
        with pytest.raises(IndexError):
            images.slice([3])

    def test_joining(self):
        both = PackedTensor.concat([self.images(), self.images()])
        assert len(both) == 6
        flat = PackedTensor.flattened_concat([self.images(), self.images()])
        assert [t.shape for t in flat] == [(3, 3), (3, 3)]
        with pytest.raises(ValueError, match=r"different dimensions \[0, 1\]"):
            PackedTensor.concat([self.images(), PackedTensor([torch.ones(2, 3)], 1)])

    @pytest.mark.parametrize(
        ("tensors", "message"),
        [
            ([torch.ones(1, 3), torch.ones(1, 4)], "row 1 of .* does not join"),
            ([torch.ones(1), torch.ones(1, dtype=torch.bfloat16)], "bfloat16"),
            ([torch.tensor(1.0)], "no dimension 0 to pack"),
            ([1], "row 0 holds a int"),
        ],
    )
    def test_what_does_not_fit(self, tensors, message):
        with pytest.raises(ValueError, match=message):
            PackedTensor(tensors)

    def test_as_a_column(self):
        batch = BatchedDataDict(images=self.images(), n=np.arange(3))
        assert len(batch.repeat_interleave(2)["images"]) == 6
        assert batch.slice(1, 3)["images"][0] is None
        buffers = []
        payload = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
        shared = [read_only_copy(buffer) for buffer in buffers]
        first, second = (pickle.loads(payload, buffers=shared) for _ in range(2))
        first["images"][0].zero_()
        BatchedDataDict.concat([second.slice(0, 1), second.slice(1, 3)])["images"][0].zero_()
        assert same(second["images"], batch["images"])
        with pytest.raises(BatchSchemaError, match="column 'images': tensors packed along different"):
            BatchedDataDict.concat(
                [batch, BatchedDataDict(images=PackedTensor([torch.ones(1, 3)], 1), n=np.arange(1))]
            )


def test_8_bit_floats_are_padded():
    rows = RaggedTensor(torch.ones(3).to(torch.float8_e4m3fn), [1, 2])
    padded = rows.to_padded(2, pad_side="left")
    assert padded.dtype == torch.float8_e4m3fn and padded.float().tolist() == [[2, 1], [1, 1]]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_numbers_are_padded(dtype):
    most = torch.iinfo(dtype).max
    rows = RaggedTensor(torch.full((3,), most, dtype=dtype), [1, 2])
    padded = rows.to_padded(most - 1)
    assert padded.dtype == dtype and padded.tolist() == [[most, most - 1], [most, most]]


@given(st.tuples(st.integers(0, 3), st.integers(1, 3)), st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_a_tensor_is_padded_in_each_dimension_on_its_side(shape, more):
    tensor = torch.arange(shape[0] * shape[1]).reshape(shape)
    wanted = [length + added for length, added in zip(shape, more, strict=True)]
    for side, widths in (("right", [(0, n) for n in more]), ("left", [(n, 0) for n in more])):
        found = padded_to(tensor, wanted, -1, side)
        assert found.tolist() == np.pad(tensor.numpy(), widths, constant_values=-1).tolist()
    assert padded_to(tensor, shape, -1) is tensor


@given(
    st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=3), st.sampled_from(["left", "right"])
)
def test_joined_tensors_are_padded_to_the_longest_in_each_dimension_but_the_first(shapes, side):
    tensors = [torch.arange(math.prod(shape)).reshape(shape) for shape in shapes]
    inner = [max(lengths) for lengths in zip(*(shape[1:] for shape in shapes), strict=True)]
    padded = [padded_to(tensor, [len(tensor), *inner], -1, side) for tensor in tensors]
    assert join(tensors, "x", -1, side).tolist() == torch.cat(padded).tolist()


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.int64), (torch.int64, torch.float32)])
def test_tensors_of_two_dtypes_do_not_join(dtypes):
    with pytest.raises(BatchSchemaError, match="does not join"):
        join([torch.ones(2, dtype=dtype) for dtype in dtypes], "x")


@pytest.mark.parametrize("dims", [(1, 2), (2, 1), (2, 3)])
def test_tensors_of_other_numbers_of_dimensions_do_not_join(dims):
    with pytest.raises(BatchSchemaError, match=f"of {dims[1]} dimensions does not join"):
        join([torch.ones([2] * n) for n in dims], "x")


@pytest.mark.parametrize(
    ("dtype", "held", "refused"),
    [
        (torch.bool, [0, 1, True, 0.0], [2, -1, 0.5]),
        (torch.int8, [-128, 127, 0, 3.0], [-129, 128, 0.5, math.inf]),
        (torch.uint8, [0, 255], [-1, 256]),
        (torch.float16, [65504, -65504.0, 0.0, -0.0, 0.1, -1.5, 1.5, math.inf, -math.inf], [65505, 65536.0]),
        (torch.float32, [torch.finfo(torch.float32).max, 2**24], [2**24 + 1, 1e39, 1e-60, -1e-60]),
        (torch.float8_e4m3fn, [448, -448.0, 16, 0.0, math.nan], [17, 449.0, math.inf, -math.inf]),
        (torch.complex64, [1, -0.5, 0.0], [2**24 + 1, 1e39]),
    ],
)
def test_a_padding_is_what_the_dtype_holds(dtype, held, refused):
    for value in held:
        check_pad_value(value, dtype, "x")
    for value in refused:
        with pytest.raises(BatchSchemaError, match="does not hold the padding"):
            check_pad_value(value, dtype, "x")
