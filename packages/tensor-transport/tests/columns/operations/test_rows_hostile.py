"""Rows that are named again, padded or replaced: no row shares with another, and no real one is dropped."""

import functools
import pickle
import threading

import numpy as np
import pytest
import torch
from batches import same

from raycrew.tensor_transport import BatchedDataDict, BatchSchemaError, PackedTensor

pytestmark = pytest.mark.hostile


def chats():
    objects = np.empty((3, 2), dtype=object)
    objects[:] = [[[f"{row}{place}"] for place in "ab"] for row in range(3)]
    return BatchedDataDict(
        chat=[[f"row {i}"] for i in range(3)],
        objects=objects,
        images=PackedTensor([torch.zeros(1), [torch.zeros(1), torch.zeros(1)], None]),
    )


def spoil(batch, row):
    batch["chat"][row].append("spoilt")
    batch["objects"][row, 1].append("spoilt")
    for segment in batch["images"].tensors[row] or ():
        segment.fill_(7)


class TestSharing:
    def test_padding_shares_nothing_with_rows_or_with_the_source(self):
        batch = chats()
        padded, _ = batch.pad_to_divisor(8)
        for row in (3, 4, 6):
            spoil(padded, row)
        assert batch == chats() and padded.unpad() == chats()
        assert padded[6:8]["chat"] == [["row 0", "spoilt"], ["row 1"]]

    @pytest.mark.parametrize("rows", [[0, 0], torch.tensor([1, 0, 1]), np.array([2, 2, 2, -3, 0])])
    def test_rows_named_again(self, rows):
        batch = chats()
        chosen = batch[rows]
        spoil(chosen, len(rows) - 1)
        assert batch == chats()
        assert same(chosen[:-1]["chat"], [chats()["chat"][i] for i in list(rows)[:-1]])

    def test_rows_named_once_are_those_of_the_batch(self):
        batch = chats()
        assert batch[[2, 0]]["chat"][1] is batch.apply_order([2, 1, 0])["chat"][2] is batch["chat"][0]
        assert batch[[0, 0]]["chat"][0] is batch["chat"][0]

    def test_what_can_not_be_copied_is_named(self):
        batch = BatchedDataDict(x=torch.ones(3), lock=[threading.Lock() for _ in range(3)])
        assert batch[[2, 0, 1]]["lock"][1] is batch["lock"][0]
        with pytest.raises(BatchSchemaError, match="column 'lock' can't have a row twice") as refused:
            batch.pad_to_divisor(2)
        assert refused.value.key == "lock"


class TestPadding:
    def test_a_slice_that_is_padded_again(self):
        padded, _ = BatchedDataDict(x=torch.arange(3)).pad_to_divisor(4)
        assert padded[:].pad_to_divisor(8)[0].unpad()["x"].tolist() == [0, 1, 2]

    def test_other_rows_in_place_of_all_have_none(self):
        for change in (
            lambda b: b.update(x=torch.arange(10)),
            lambda b: (b.pop("x"), b.update(x=torch.arange(10))),
        ):
            padded, _ = BatchedDataDict(x=torch.arange(3)).pad_to_divisor(4)
            change(padded)
            with pytest.raises(ValueError, match="not what pad_to_divisor"):
                padded.unpad()
        padded["x"] = torch.zeros(10)
        assert padded["x"].shape == (10,)

    def test_dropping_some_keeps_the_rest_in_mind(self):
        padded, added = BatchedDataDict(x=torch.arange(3)).pad_to_divisor(8)
        assert added == 5 and padded.unpad(0).padding_rows == 5
        assert padded.unpad(2).padding_rows == 3
        assert padded.unpad(2).unpad()["x"].tolist() == [0, 1, 2]
        assert padded.unpad(7).padding_rows is None

    def test_each_part_has_its_share(self):
        padded, _ = BatchedDataDict(x=torch.arange(3)).pad_to_divisor(8)
        assert [part.padding_rows for part in padded.shard(4)] == [0, 1, 2, 2]
        assert [padded[rows].padding_rows for rows in (slice(0, 3), slice(1, 8, 3), slice(4, 4))] == [0, 2, 0]
        assert padded[:4].unpad()["x"].tolist() == [0, 1, 2]
        assert pickle.loads(pickle.dumps(padded[2:5])).unpad()["x"].tolist() == [2]

    def test_joins_know_where_it_comes_last(self):
        batch = BatchedDataDict(x=torch.arange(3))
        padded, _ = batch.pad_to_divisor(8)
        first, _ = batch.pad_to_divisor(3)
        joined = BatchedDataDict.concat([first, *padded.shard(4)])
        assert joined.padding_rows == 5 and joined.unpad()["x"].tolist() == [0, 1, 2, 0, 1, 2]
        for parts in ([padded, batch], [padded, padded], [batch, batch]):
            assert BatchedDataDict.concat(parts).padding_rows is None

    @pytest.mark.parametrize("last", [False, True])
    def test_joined_to_rows_of_which_nobody_knows_they_do_not_either(self, last):
        padded, _ = BatchedDataDict(x=torch.arange(3)).pad_to_divisor(4)
        chosen, known = padded[[3, 2, 1, 0]], padded[:3]  # of the chosen ones the first is padding
        joined = BatchedDataDict.concat([known, chosen] if last else [chosen, known])
        with pytest.raises(ValueError, match=r"not what pad_to_divisor\(\) gave"):
            joined.unpad()


class Counted(BatchedDataDict):
    note = "of the class"

    @functools.cached_property
    def tokens(self):
        return int(self["x"].sum())


class TestAttributes:
    def test_what_a_property_cached_is_computed_from_the_rows_there_are(self, tmp_path):
        batch = Counted(x=torch.arange(4))
        assert batch.tokens == 6
        assert batch[:2].tokens == 1 and batch[[3]].tokens == 3
        assert Counted.concat([batch, batch]).tokens == 12 and Counted.concat([batch, batch[:2]]).tokens == 7
        batch.save(tmp_path / "batch")
        assert Counted.load(tmp_path / "batch").tokens == 6
        assert pickle.loads(pickle.dumps(batch)).tokens == 6 and batch.copy().tokens == 6

    def test_none_is_saved(self, tmp_path):
        batch = Counted(x=torch.arange(4))
        batch.note = None
        batch.save(tmp_path / "batch")
        assert Counted.load(tmp_path / "batch").note is None
