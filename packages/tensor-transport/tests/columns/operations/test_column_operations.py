"""Columns chosen, renamed, merged and cast: what is refused is named before anything changes."""

import pickle

import numpy as np
import pytest
import torch

from raycrew.tensor_transport import (
    BatchedDataDict,
    BatchSchemaError,
    PackedTensor,
    RaggedTensor,
    ShardRegistry,
    SlicedDataDict,
    remotize,
)
from raycrew.tensor_transport.testing import InProcessBackend


class Rollouts(BatchedDataDict):
    pass


@pytest.fixture
def batch():
    batch = Rollouts(
        {"ids": torch.arange(6).view(3, 2), "reward": np.array([1.0, 2.0, 3.0]), "text": ["a", "b", "c"]},
        metadata={"step": 1},
    )
    batch.tokenizer = "words"
    batch.micro_batch_indices, batch.micro_batch_lengths = [[[0, 3]]], [[2]]
    return batch


class TestChoosing:
    def test_selected_columns_are_not_copied(self, batch):
        chosen = batch.select(["text", "ids"])
        assert list(chosen) == ["text", "ids"]
        assert chosen["ids"] is batch["ids"]
        assert type(chosen) is Rollouts
        assert (chosen.tokenizer, chosen.metadata) == ("words", {"step": 1})
        assert chosen.micro_batch_lengths == [[2]]
        assert len(batch) == 3

    def test_popped_columns_are_a_batch(self, batch):
        ids, reward = batch["ids"], batch["reward"]
        taken = batch.pop(("ids", "reward"))
        assert type(taken) is Rollouts
        assert taken["ids"] is ids and taken["reward"] is reward
        assert list(batch) == ["text"]
        assert batch.pop("text") == ["a", "b", "c"]
        assert batch.pop("text", None) is None

    def test_all_or_none_are_popped(self, batch):
        with pytest.raises(KeyError, match=r"there are no columns rewards; .*did you mean 'reward'"):
            batch.pop(["ids", "rewards"])
        with pytest.raises(TypeError, match="a default is for one column"):
            batch.pop(["ids"], None)
        with pytest.raises(KeyError):
            batch.pop("rewards")
        assert list(batch) == ["ids", "reward", "text"]

    def test_one_string_is_no_list_of_names(self, batch):
        with pytest.raises(TypeError, match="not by the one string 'ids'"):
            batch.select("ids")
        with pytest.raises(TypeError, match="not by the one string 'ids'"):
            batch.truncate_tensors(1, 1, keys="ids")

    def test_nothing(self, batch):
        assert batch.select([]).size == 0
        assert BatchedDataDict().select([]) == {}


class TestRenaming:
    def test_keeps_place_and_rows(self, batch):
        renamed = batch.rename({"ids": "text", "text": "ids"})
        assert list(renamed) == ["text", "reward", "ids"]
        assert renamed["text"] is batch["ids"]
        assert renamed.micro_batch_lengths == [[2]]
        assert list(batch) == ["ids", "reward", "text"]

    @pytest.mark.parametrize(
        ("names", "error", "match"),
        [
            ({"idz": "x"}, KeyError, "no columns idz"),
            ({"ids": "text"}, ValueError, "two columns would be named 'text'"),
            ({"ids": "x", "text": "x"}, ValueError, "two columns would be named 'x'"),
            ({"ids": 3}, TypeError, "'ids' would be named 3"),
        ],
    )
    def test_refused(self, batch, names, error, match):
        with pytest.raises(error, match=match):
            batch.rename(names)
        assert list(batch) == ["ids", "reward", "text"]


class TestUnion:
    def test_columns_of_both(self, batch):
        both = batch.union({"advantage": torch.zeros(3), "text": ["a", "b", "c"]})
        assert list(both) == ["ids", "reward", "text", "advantage"]
        assert type(both) is Rollouts and both.tokenizer == "words"
        assert both["ids"] is batch["ids"]
        assert both.micro_batch_lengths == [[2]]
        assert "advantage" not in batch

    @pytest.mark.parametrize(
        "other", [torch.arange(6).view(3, 2) + 1, torch.arange(6.0).view(3, 2), np.arange(6).reshape(3, 2)]
    )
    def test_a_conflict_is_named(self, batch, other):
        with pytest.raises(BatchSchemaError, match="column 'ids' differs between the two batches") as info:
            batch.union({"more": torch.zeros(3), "ids": other})
        assert info.value.key == "ids"
        assert "more" not in batch

    def test_other_rows_are_refused(self, batch):
        with pytest.raises(BatchSchemaError, match="column 'x' has 2 rows, the batch has 3"):
            batch.union({"x": [1, 2]})

    def test_metadata_follow_the_rules(self, batch):
        other = BatchedDataDict(x=[1, 2, 3], metadata={"step": 2, "more": 1})
        with pytest.raises(BatchSchemaError, match="metadata 'step' differs"):
            batch.union(other)
        assert batch.union(other, metadata="first").metadata == {"step": 1, "more": 1}
        assert batch.metadata == {"step": 1}

    def test_attributes_and_plans_of_both(self, batch):
        other = Rollouts(x=[1, 2, 3])
        other.scores, other.tokenizer, other.elem_counts_per_gb = "by hand", "words", [3]
        both = batch.union(other)
        assert (both.scores, both.tokenizer, both.elem_counts_per_gb) == ("by hand", "words", [3])
        assert both.micro_batch_lengths == [[2]]
        for name, value in (("tokenizer", "bytes"), ("micro_batch_lengths", [[3]])):
            differs = Rollouts(x=[1, 2, 3])
            setattr(differs, name, value)
            with pytest.raises(BatchSchemaError, match=f"'{name}' differs"):
                batch.union(differs)
            assert getattr(batch.union(differs, metadata="first"), name) == getattr(batch, name)

    def test_empty_ones(self, batch):
        assert BatchedDataDict().union(batch) == batch
        assert batch.union({}) == batch

    def test_handles_on_the_same_rows_are_equal(self, batch):
        handles = remotize(batch.select(["ids"]), ShardRegistry(InProcessBackend()))
        assert handles[[2, 0]].union(handles[[2, 0]]).size == 2
        with pytest.raises(BatchSchemaError, match="column 'ids' differs"):
            handles[[2, 0]].union(handles[[0, 2]])


class TestCast:
    def test_named_columns_alone(self, batch):
        cast = batch.cast({"ids": torch.int32, "reward": torch.float32})
        assert cast["ids"].dtype == torch.int32 and cast["ids"].tolist() == [[0, 1], [2, 3], [4, 5]]
        assert cast["reward"].dtype == np.float32
        assert cast["text"] is batch["text"]
        assert batch["ids"].dtype == torch.int64
        assert cast.micro_batch_lengths == [[2]]

    def test_ragged_and_packed(self):
        ragged = RaggedTensor(torch.arange(3), [2, 0, 1])
        packed = PackedTensor([torch.ones(1, 2), None, torch.ones(2, 2)])
        cast = BatchedDataDict(r=ragged, p=packed).cast({"r": torch.float32, "p": torch.bfloat16})
        assert cast["r"].dtype == torch.float32 and cast["r"].lengths.tolist() == [2, 0, 1]
        assert cast["p"][1] is None and cast["p"][2].dtype == torch.bfloat16

    def test_fractions_are_rounded(self):
        batch = BatchedDataDict(x=torch.tensor([0.1, torch.nan, torch.inf, -torch.inf]))
        cast = batch.cast({"x": torch.bfloat16})["x"]
        assert cast[0] == torch.tensor(0.1).bfloat16() and cast[1].isnan() and cast[2] == torch.inf

    @pytest.mark.parametrize(
        ("values", "dtype"),
        [
            (torch.tensor([1e39], dtype=torch.float64), torch.float32),
            (torch.tensor([1e6]), torch.float8_e4m3fn),
            (torch.tensor([70000.0]), torch.float16),
            (torch.tensor([50257]), torch.bfloat16),
            (torch.tensor([2**24 + 1]), torch.float32),
            (torch.tensor([300]), torch.int8),
            (torch.tensor([-1]), torch.uint16),
            (torch.tensor([2]), torch.bool),
            (torch.tensor([0.5]), torch.int64),
            (torch.tensor([torch.nan]), torch.int64),
            (torch.tensor([torch.inf]), torch.int32),
            (torch.tensor([1 + 2j]), torch.float32),
            (np.array([2**40]), torch.int32),
        ],
    )
    def test_what_a_dtype_does_not_hold_is_refused(self, values, dtype):
        batch = BatchedDataDict(ok=torch.ones(1), x=values)
        with pytest.raises(BatchSchemaError, match=r"column 'x' .*lossy=True") as info:
            batch.cast({"ok": torch.float64, "x": dtype})
        assert info.value.key == "x"
        assert batch["ok"].dtype == torch.float32

    def test_lossy_when_asked(self):
        assert BatchedDataDict(x=torch.tensor([0.5])).cast({"x": torch.int64}, lossy=True)["x"].item() == 0

    @pytest.mark.parametrize(
        ("column", "match"),
        [
            ([1, 2], "column 'x' is a list, which has no dtype"),
            (np.array(["a", "b"]), "column 'x' of <U1 holds no numbers"),
            (np.array([1.0, 2.0]), "numpy has no torch.bfloat16"),
        ],
    )
    def test_columns_without_dtypes(self, column, match):
        with pytest.raises(BatchSchemaError, match=match):
            BatchedDataDict(x=column).cast({"x": torch.bfloat16})

    def test_handles_are_localised_first(self, batch):
        handles = remotize(batch, ShardRegistry(InProcessBackend()))
        with pytest.raises(BatchSchemaError, match=r"column 'ids' is a handle: localize\(\) it"):
            handles.cast({"ids": torch.int32})

    def test_names_and_dtypes_are_checked(self, batch):
        with pytest.raises(KeyError, match="did you mean 'ids'"):
            batch.cast({"idss": torch.int32})
        with pytest.raises(BatchSchemaError, match=r"'ids' is cast to a torch.dtype, not to 'int32'"):
            batch.cast({"ids": "int32"})

    def test_empty(self):
        assert BatchedDataDict(x=torch.zeros(0, 2)).cast({"x": torch.int8})["x"].shape == (0, 2)


class TestFromDict:
    def test_columns_and_metadata_are_told_apart_by_type(self):
        batch = Rollouts.from_dict(
            {
                "ids": torch.zeros(2, 3),
                "text": ("a", "b"),
                "loss": torch.tensor(0.5),
                "lr": 0.1,
                "name": "xy",
                "none": None,
                "metrics": {"a": 1},
                "stop": ["x"],
            },
            metadata_keys=["stop"],
        )
        assert type(batch) is Rollouts
        assert list(batch) == ["ids", "text"]
        assert list(batch.metadata) == ["loss", "lr", "name", "none", "metrics", "stop"]
        assert batch.metadata["stop"] == ["x"]

    def test_what_does_not_fit_is_named(self):
        with pytest.raises(BatchSchemaError, match="column 'stop' has 1 rows, the batch has 2") as info:
            BatchedDataDict.from_dict({"ids": torch.zeros(2, 3), "stop": ["x"]})
        assert info.value.key == "stop"
        with pytest.raises(KeyError, match="no columns stopp"):
            BatchedDataDict.from_dict({"stop": ["x"]}, metadata_keys=["stopp"])
        with pytest.raises(BatchSchemaError, match=r"column 'm' .*its mask would be lost"):
            BatchedDataDict.from_dict({"m": np.ma.masked_array([1], [True])})

    def test_empty(self):
        assert BatchedDataDict.from_dict({}).size == 0


class TestRows:
    def test_views_for_slices(self, batch):
        part = batch[1:]
        assert part["ids"].data_ptr() == batch["ids"][1:].data_ptr()
        assert part.micro_batch_indices is None
        assert type(part) is Rollouts

    def test_wrong_rows(self, batch):
        with pytest.raises(IndexError, match="row 3 is out of range"):
            batch[[3]]
        with pytest.raises(TypeError, match="wrap it in a list"):
            batch[0]
        with pytest.raises(TypeError, match="by integers or booleans"):
            batch[["ids", "text"]]
        with pytest.raises(KeyError):
            batch["idz"]

    def test_a_slice_is_one_of_the_class(self):
        part = SlicedDataDict(x=[1, 2, 3])[::2]
        assert type(part) is SlicedDataDict and part["x"] == [1, 3]

    @pytest.mark.parametrize("size", [0, 1, 5])
    @pytest.mark.parametrize("divisor", [1, 3, 8])
    def test_padding_to_a_multiple(self, size, divisor):
        batch = BatchedDataDict(x=torch.arange(size), y=list(range(size)), metadata={"step": 1})
        padded, added = batch.pad_to_divisor(divisor)
        assert padded.padding_rows == added
        assert padded.size == size + added and padded.size % divisor == 0 and added < divisor
        assert padded["y"] == [i % size for i in range(padded.size)]
        for back in (padded.unpad(), padded.unpad(added)):
            assert back == batch and back.metadata == {"step": 1} and back.padding_rows is None

    def test_padding_is_remembered_where_it_comes_last(self, batch, tmp_path):
        padded, added = batch.pad_to_divisor(4)
        padded.save(tmp_path / "batch")
        for same_rows in (
            padded.copy(),
            padded.select(["text"]),
            padded.union({"more": [1, 2, 3, 4]}),
            pickle.loads(pickle.dumps(padded)),
            Rollouts.load(tmp_path / "batch"),
        ):
            assert same_rows.padding_rows == 1 and same_rows.unpad()["text"] == ["a", "b", "c"]
        for others in (batch, padded[[0, 1, 2, 3]], Rollouts.concat([padded, padded])):
            with pytest.raises(ValueError, match=r"not what pad_to_divisor\(\) gave: .*padding_rows"):
                others.unpad()
        result = Rollouts.concat([part.select(["text"]) for part in padded.shard(2)])
        assert result.unpad()["text"] == result.unpad(added)["text"] == ["a", "b", "c"]
        assert [part.padding_rows for part in padded.shard(2)] == [0, 1]

    def test_nothing_to_pad_copies_nothing_and_keeps_a_plan(self, batch):
        padded, added = batch.pad_to_divisor(3)
        assert padded.padding_rows == added == 0
        assert padded["ids"] is batch["ids"] and padded.micro_batch_lengths == [[2]]
        assert padded.unpad() == batch and padded.unpad().micro_batch_lengths == [[2]]
        assert batch.pad_to_divisor(2)[0].micro_batch_lengths is None

    def test_what_is_left_of_padding_is_known_where_there_is_some_left(self, batch):
        assert batch.unpad(3).size == 0 and batch.unpad(0).padding_rows is batch.unpad(1).padding_rows is None
        padded, added = batch.pad_to_divisor(5)
        assert (added, padded.unpad(1).padding_rows) == (2, 1)
        for dropped in (2, 3):
            rest = padded.unpad(dropped)
            assert rest.size == 5 - dropped and rest.padding_rows is None
            with pytest.raises(ValueError, match=r"not what pad_to_divisor\(\) gave"):
                rest.unpad()
        assert batch[:1].pad_to_divisor(3)[0].size == 3

    def test_padding_that_is_not_there(self, batch):
        with pytest.raises(ValueError, match="4 rows can't be dropped from a batch of 3"):
            batch.unpad(4)
        for added in (-1, 1.0, True, "1"):
            with pytest.raises(ValueError, match=r"is an integer of at least 0, not"):
                batch.unpad(added)
        for divisor in (0, 2.0, True, None):
            with pytest.raises(ValueError, match="is an integer of at least 1, not"):
                batch.pad_to_divisor(divisor)

    def test_orders(self, batch):
        order = torch.tensor([2, 0, 1])
        assert batch.apply_order(order)["text"] == ["c", "a", "b"]
        assert batch.undo_order(order)["text"] == ["b", "c", "a"]
        assert batch.apply_order(order).undo_order(order) == batch
        assert batch.copy().reorder_data(order) == batch.undo_order(order)
        assert batch["text"] == ["a", "b", "c"]
        for name in ("apply_order", "undo_order"):
            with pytest.raises(ValueError, match="not a permutation"):
                getattr(batch, name)([0, 0, 1])
