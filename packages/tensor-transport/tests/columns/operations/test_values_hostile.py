"""Operations that would have changed values without a word."""

import numpy as np
import pytest
import torch

from raycrew.tensor_transport import BatchedDataDict, BatchSchemaError, RaggedTensor

pytestmark = pytest.mark.hostile


class TestTruncating:
    @staticmethod
    def microbatches(**columns):
        ids = torch.tensor([[0, 0, 1, 2], [0, 0, 0, 3]])
        batch = BatchedDataDict(ids=ids, lengths=torch.tensor([2, 1]), **columns)
        args = {"max_tokens_per_microbatch": 4, "input_key": "ids", "input_lengths_key": "lengths"}
        (shard,), _ = batch.shard_by_batch_size(1, dynamic_batching_args=args)
        return shard.get_batch(0, 2)

    def test_rows_padded_on_the_left_keep_their_tokens(self):
        (found,) = self.microbatches().make_microbatch_iterator_with_dynamic_shapes(pad_side="left")
        assert sorted(found["ids"].tolist()) == [[0, 3], [1, 2]]
        with pytest.raises(ValueError, match="'left' or 'right'"):
            self.microbatches().make_microbatch_iterator_with_dynamic_shapes(pad_side="top")

    def test_columns_of_another_width_are_not_cut(self):
        planned = self.microbatches(hidden=torch.ones(2, 8), deep=torch.ones(2, 4, 3))
        (found,) = planned.make_microbatch_iterator_with_dynamic_shapes()
        assert found["ids"].shape == (2, 2)
        assert found["hidden"].shape == (2, 8) and found["deep"].shape == (2, 2, 3)
        (found,) = planned.make_microbatch_iterator_with_dynamic_shapes(keys=["hidden"])
        assert found["hidden"].shape == (2, 2) and found["ids"].shape == (2, 4)

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_arrays_are_cut_as_tensors_are(self, side):
        ids = np.array([[0, 0, 1, 2, 0, 0], [0, 0, 3, 0, 0, 0]])
        columns = {"lengths": [4, 3], "hidden": np.ones((2, 8)), "flat": np.ones(2), "deep": ids[..., None]}
        batch = BatchedDataDict(ids=ids, **columns)
        args = {"max_tokens_per_microbatch": 8, "input_key": "ids", "input_lengths_key": "lengths"}
        (shard,), _ = batch.shard_by_batch_size(1, dynamic_batching_args=args)
        (found,) = shard.make_microbatch_iterator_with_dynamic_shapes(pad_side=side)
        kept = slice(2, 6) if side == "left" else slice(0, 4)
        assert sorted(found["ids"].tolist()) == sorted(ids[:, kept].tolist())
        assert found["deep"].shape == (2, 4, 1) and found["hidden"].shape == (2, 8)
        assert found["flat"].shape == (2,) and np.shares_memory(found["ids"], shard["ids"])

    def test_arrays_beside_a_tensor_of_tokens_are_cut_if_they_are_as_wide(self):
        planned = self.microbatches(scores=np.ones((2, 4)), hidden=np.ones((2, 3)))
        (found,) = planned.make_microbatch_iterator_with_dynamic_shapes()
        assert found["scores"].shape == found["ids"].shape == (2, 2) and found["hidden"].shape == (2, 3)

    def test_the_last_elements(self):
        batch = BatchedDataDict(x=torch.tensor([[1, 2, 3]]), r=RaggedTensor(torch.tensor([4, 5, 6]), [3]))
        found = batch.truncate_tensors(1, 2, pad_side="left")
        assert found["x"].tolist() == [[2, 3]] and found["r"].values.tolist() == [5, 6]


class TestMeans:
    @staticmethod
    def mean(*values, rows=(3, 1)):
        parts = [BatchedDataDict(x=[0] * n, metadata={"m": v}) for n, v in zip(rows, values, strict=True)]
        return BatchedDataDict.concat(parts, metadata="mean").metadata["m"]

    def test_numbers_of_a_narrow_dtype_do_not_overflow(self):
        found = self.mean(np.float16(60000), np.float16(60000))
        assert found == np.float16(60000) and type(found) is np.float16
        assert self.mean(np.complex64(3e38), np.complex64(3e38)) == np.complex64(3e38)
        assert self.mean(np.array([60000, 1], np.float16), np.array([60000, 1], np.float16))[0] == 59999 + 1
        assert self.mean(1.0, np.float16(3)) == 1.5


class TestLengths:
    @pytest.mark.parametrize("bad", [[1.9, 2.2], torch.tensor([1.5, 1.5]), [1 + 0j, 2], [True, True]])
    def test_that_are_no_integers_are_refused(self, bad):
        with pytest.raises(ValueError, match="lengths are one dimension of non-negative integers"):
            RaggedTensor(torch.arange(3), bad)
        with pytest.raises(ValueError, match="lengths are one dimension of non-negative integers"):
            RaggedTensor.from_padded(torch.ones(2, 3), bad)

    def test_are_those_that_were_given(self):
        lengths = torch.tensor([1, 2])
        ragged = RaggedTensor(torch.arange(3), lengths)
        lengths[0] = 7
        assert ragged.lengths.tolist() == [1, 2] and ragged[1].tolist() == [1, 2]


def test_a_batch_as_a_dict_keeps_its_metadata():
    batch = BatchedDataDict(x=[1], metadata={"step": 3})
    assert BatchedDataDict.from_dict(batch).metadata == {"step": 3}
    assert BatchedDataDict.from_dict({"x": [1], "step": 4}).metadata == {"step": 4}
    with pytest.raises(BatchSchemaError):
        BatchedDataDict.from_dict({"x": [1], "y": [1, 2]})


class Vague:
    def __eq__(self, other):
        return np.array([True, False])

    __hash__ = None


class TestComparing:
    @pytest.mark.parametrize(
        ("a", "b"),
        [
            (np.ma.array([1, 2], mask=[False, True]), np.ma.array([1, 2], mask=[False, False])),
            (np.ma.array([1, 2], mask=[False, False]), np.array([1, 2])),
            (1.0, np.float64(1.0)),
            (1.0, 1 + 0j),
        ],
    )
    def test_masks_and_types_count(self, a, b):
        assert BatchedDataDict(x=[a]) != BatchedDataDict(x=[b])
        assert BatchedDataDict(x=[b]) != BatchedDataDict(x=[a])
        assert BatchedDataDict(x=[a]) == BatchedDataDict(x=[a]).writable()

    def test_what_is_masked_and_fields_that_are_nan(self):
        masked = [np.ma.array([1, last], mask=[False, True]) for last in (2, 3)]
        assert BatchedDataDict(x=[masked[0]]) == BatchedDataDict(x=[masked[1]])
        fields = [np.array([(1, np.nan)], dtype=[("a", "i4"), ("b", "f8")]) for _ in range(2)]
        assert BatchedDataDict(x=fields[0]) == BatchedDataDict(x=fields[1])

    def test_what_can_not_be_compared_is_named(self):
        with pytest.raises(BatchSchemaError, match="column 'x' can't be compared") as refused:
            BatchedDataDict(x=[Vague()]).union({"x": [Vague()]})
        assert refused.value.key == "x"


def test_positions_tell_every_row_of_a_column():
    rows = torch.arange(2000).view(1000, 2)
    other = rows.clone()
    other[501, 1] = 7
    for ours, theirs in ((rows, other), (rows.tolist(), other.tolist())):
        state = BatchedDataDict(x=ours).make_iterator(4).state_dict()
        BatchedDataDict(x=ours).make_iterator(4).load_state_dict(state)
        with pytest.raises(ValueError, match="other rows: columns x differ"):
            BatchedDataDict(x=theirs).make_iterator(4).load_state_dict(state)


def test_texts_keep_zeros_at_their_end(tmp_path):
    texts = [np.str_("a\0"), np.bytes_(b"b\0"), np.str_("")]
    BatchedDataDict(x=texts).save(tmp_path / "batch")
    found = BatchedDataDict.load(tmp_path / "batch")["x"]
    assert found == texts and list(map(type, found)) == list(map(type, texts))


def test_unpacking_does_not_replace_what_was_no_padding():
    batch = BatchedDataDict(ids=torch.tensor([[1, 9], [2, 3]]), n=torch.tensor([1, 2]))
    packed = batch.pack_sequences(["ids"], "n")
    assert packed.columns["ids"].tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="columns ids were not padded with what"):
        packed.unpack()
    packed = batch.pack_sequences(["ids"], "n", pad_value_dict={"ids": 9})
    assert packed.unpack()["ids"].equal(batch["ids"])
