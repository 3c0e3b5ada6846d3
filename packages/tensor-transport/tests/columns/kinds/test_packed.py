"""Rows of several tensors, of None, of other shapes."""

import pickle

import numpy as np
import pytest
import torch
from batches import assert_same, same

from raycrew.tensor_transport import (
    BatchedDataDict,
    BatchSchemaError,
    PackedTensor,
    ShardRegistry,
    localize,
    remotize,
)
from raycrew.tensor_transport.testing import InProcessBackend


def image(*shape, start=0):
    return torch.arange(start, start + int(np.prod(shape))).view(shape).float()


def rows():
    return PackedTensor([[image(2, 3), image(1, 3, start=9)], None, image(4, 3), [], [image(1, 3)]])


class TestSegments:
    def test_are_kept_apart_and_joined_in_order(self):
        packed = rows()
        assert [None if row is None else type(row) for row in packed] == [
            tuple,
            None,
            torch.Tensor,
            None,
            tuple,
        ]
        assert packed.segment_lengths == [[2, 1], [], [4], [], [1]]
        assert packed.lengths == [3, 0, 4, 0, 1]
        assert packed.as_tensor().shape == (8, 3)
        assert packed.as_tensor()[2].tolist() == [9, 10, 11]
        assert packed.nbytes == 8 * 3 * 4
        assert "[[2, 3], [1, 3]], None, [4, 3], ..." in repr(packed)

    def test_travel(self):
        batch = BatchedDataDict(x=rows(), y=[rows()] * 5)
        assert_same(pickle.loads(pickle.dumps(batch)), batch)
        assert same(pickle.loads(pickle.dumps(rows())), rows())
        registry = ShardRegistry(InProcessBackend())
        handles = remotize(batch, registry)
        assert handles["x"].segment_lengths == rows().segment_lengths
        with pytest.raises(TypeError, match="localize"):
            handles["x"].as_tensor()
        with pytest.raises(TypeError, match="localize"):
            handles["x"].to_padded()
        assert_same(localize(handles[[2, 0]], registry), batch[[2, 0]])

    def test_repeats_share_when_asked(self):
        batch = BatchedDataDict(x=rows())
        shared, apart = batch.repeat_interleave(2, share=True)["x"], batch.repeat_interleave(2)["x"]
        assert shared[0][1] is shared[1][1] is batch["x"][0][1]
        assert apart[0][1] is not apart[1][1] is not batch["x"][0][1]
        assert same(shared.tensors, apart.tensors)

    @pytest.mark.hostile
    def test_a_dimension_is_an_integer(self):
        for dim in (True, 0.0, "0", None):
            with pytest.raises(ValueError, match="dim_to_pack is the number of a dimension, not"):
                PackedTensor([None], dim)
            with pytest.raises(ValueError, match="dim_to_pack is the number of a dimension, not"):
                PackedTensor.padded([None], dim)
        assert PackedTensor([image(1, 2)], np.int64(1)).dim_to_pack == 1
        with pytest.raises(ValueError, match="nothing to join"):
            PackedTensor.concat([])

    def test_what_does_not_join_is_refused(self):
        with pytest.raises(ValueError, match=r"row 1 of .* does not join"):
            PackedTensor([image(2, 3), [image(2, 3), image(2, 4)]])
        with pytest.raises(ValueError, match="row 0 holds a list"):
            PackedTensor([[[image(2, 3)]]])
        with pytest.raises(BatchSchemaError, match="column 'x' is a nested or sparse tensor"):
            BatchedDataDict(x=PackedTensor([[image(2, 3), image(2, 3).to_sparse()]]))


class TestDtype:
    def test_of_rows_and_of_none(self):
        assert rows().dtype == torch.float32
        assert PackedTensor([None, None]).dtype is None
        assert PackedTensor([None, [image(1).half()]]).dtype == torch.float16

    def test_cast_keeps_segments(self):
        cast = BatchedDataDict(x=rows()).cast({"x": torch.bfloat16})["x"]
        assert cast.dtype == torch.bfloat16 and cast.segment_lengths == rows().segment_lengths
        assert BatchedDataDict(x=PackedTensor([None])).cast({"x": torch.int8})["x"][0] is None


class TestPadding:
    def test_rows_of_one_shape(self):
        padded = rows().to_padded(-1)
        assert padded.shape == (5, 4, 3) and padded.dtype == torch.float32
        assert padded[0, :3].equal(torch.cat(rows()[0])) and padded[0, 3].eq(-1).all()
        assert padded[1].eq(-1).all()
        left = rows().to_padded(-1, pad_side="left")
        assert left[4, 3].tolist() == [0, 1, 2] and left[4, :3].eq(-1).all()
        turned = PackedTensor([image(2, 1), image(2, 3)], dim_to_pack=-1).to_padded()
        assert turned.shape == (2, 2, 3) and turned[0].tolist() == [[0, 0, 0], [1, 0, 0]]

    def test_gradients_pass(self):
        first, second = image(1, 2).requires_grad_(), image(2, 2)
        batch = BatchedDataDict(x=PackedTensor([first, None, second]))
        batch["x"].to_padded(pad_side="left").sum().backward()
        batch.repeat_interleave(2)["x"].as_tensor().sum().backward()
        assert first.grad.tolist() == [[3, 3]]

    def test_other_dimensions_to_a_common_shape(self):
        small, large = image(1, 2, 2), image(2, 3, 1)
        packed = PackedTensor.padded([small, None, [large, small]], pad_value=7)
        assert packed[0].shape == (1, 3, 2) and packed[2][0].shape == (2, 3, 2)
        assert packed[0][0].tolist() == [[0, 1], [2, 3], [7, 7]]
        assert packed.as_tensor().shape == (4, 3, 2)
        alike = PackedTensor.padded([small, small])
        assert alike[0] is small
        assert len(PackedTensor.padded([None, None])) == 2

    def test_refused(self):
        with pytest.raises(ValueError, match="no row has a tensor"):
            PackedTensor([None]).to_padded()
        with pytest.raises(BatchSchemaError, match="does not hold the padding"):
            PackedTensor([image(2).int()]).to_padded(0.5)
        with pytest.raises(ValueError, match="does not join"):
            PackedTensor.padded([image(2), image(2).half()])
        with pytest.raises(ValueError, match="'left' or 'right'"):
            rows().to_padded(pad_side="top")
        with pytest.raises(ValueError, match="does not join"):
            PackedTensor([image(1, 2), image(1, 3)])

    def test_joined_batches_are_padded_only_by_from_batches(self):
        parts = [BatchedDataDict(x=PackedTensor([image(1, n), None])) for n in (2, 3)]
        with pytest.raises(BatchSchemaError, match="column 'x'"):
            BatchedDataDict.concat(parts)
        whole = BatchedDataDict.from_batches(parts, {"x": 5}, pad_side="left")["x"]
        assert whole[0].tolist() == [[5, 0, 1]] and whole[1] is None and whole[2] is parts[1]["x"][0]
