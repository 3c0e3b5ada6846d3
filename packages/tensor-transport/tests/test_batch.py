import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from batches import assert_same, read_only_copy

from raycrew.tensor_transport import (
    BatchedDataDict,
    BatchSchemaError,
    DecodeError,
    PackedTensor,
    RaggedTensor,
    SlicedDataDict,
)


@pytest.fixture
def batch():
    return BatchedDataDict(
        {
            "input_ids": torch.arange(18).view(6, 3),
            "logprobs": torch.randn(6, 3).bfloat16(),
            "mask": torch.tensor([1, 0, 1, 1, 0, 0], dtype=torch.bool),
            "log": [[{"role": "user", "ids": torch.tensor([i])}] for i in range(6)],
            "reward": np.linspace(0, 1, 6, dtype=np.float32),
            "answer": np.array([None, "a", 2, 3.0, (4,), [5]], dtype=object),
        },
        metadata={"step": 3, "policy": torch.ones(2)},
    )


class TestMapping:
    def test_is_a_mapping_of_its_columns(self, batch):
        assert list(batch) == ["input_ids", "logprobs", "mask", "log", "reward", "answer"]
        assert len(batch) == 6
        assert batch.size == 6
        assert "log" in batch
        assert dict(batch)["input_ids"] is batch["input_ids"]
        assert batch.get_dict().keys() == batch.keys()

    def test_keywords_and_updates(self):
        batch = BatchedDataDict(a=[1, 2])
        batch.update({"b": torch.ones(2)})
        assert batch.pop("a") == [1, 2]
        assert list(batch) == ["b"]

    def test_empty(self):
        assert BatchedDataDict().size == 0
        assert BatchedDataDict().select_indices([]).size == 0

    def test_a_copy_is_independent_of_further_columns(self, batch):
        twin = batch.copy()
        twin["more"] = [0] * 6
        twin.metadata["more"] = 1
        assert "more" not in batch
        assert "more" not in batch.metadata
        assert twin["input_ids"] is batch["input_ids"]

    def test_deepcopy_shares_nothing(self, batch):
        twin = copy.deepcopy(batch)
        assert_same(twin, batch)
        twin["input_ids"].zero_()
        twin["log"][0].clear()
        assert batch["input_ids"].any()
        assert batch["log"][0]

    def test_repr_says_shapes_not_contents(self, batch):
        assert "logprobs: bfloat16[6, 3]" in repr(batch)
        assert "size=6" in repr(batch)

    def test_a_batch_made_from_a_batch_keeps_its_metadata(self, batch):
        assert SlicedDataDict(batch).metadata["step"] == 3


class TestSchema:
    def test_another_number_of_rows_is_refused_on_insertion(self, batch):
        with pytest.raises(BatchSchemaError, match="column 'x' has 5 rows, the batch has 6") as caught:
            batch["x"] = torch.zeros(5)
        assert (caught.value.key, caught.value.expected, caught.value.actual) == ("x", 6, 5)
        assert "x" not in batch

    def test_one_that_has_more_is_refused_too_and_replaced_columns_keep_their_number(self, batch):
        with pytest.raises(BatchSchemaError, match="column 'x' has 7 rows, the batch has 6"):
            batch["x"] = torch.zeros(7)
        for rows in (5, 7):
            with pytest.raises(BatchSchemaError, match=f"has {rows} rows, the batch has 6"):
                batch["input_ids"] = torch.zeros(rows, 2)

    def test_size_bytes_are_those_of_tensors_and_arrays(self):
        assert BatchedDataDict(a=torch.zeros(3, 2), b=np.zeros(3), c=["x"] * 3).size_bytes == 24 + 24
        assert BatchedDataDict(c=[1]).size_bytes == BatchedDataDict().size_bytes == 0

    @pytest.mark.parametrize("rows", [1, 3])
    def test_what_is_said_of_rows_goes_with_them(self, rows):
        batch, _ = BatchedDataDict(a=[1, 2]).pad_to_divisor(2)
        assert batch.padding_rows == 0
        batch["a"] = [3, 4]
        assert batch.padding_rows == 0
        batch["a"] = [5] * rows
        assert batch.padding_rows is None

    @pytest.mark.parametrize(
        "value", [3, "text", None, torch.tensor(1.0), np.float32(1), {"a": 1}, np.array(3)]
    )
    def test_values_without_rows_are_refused(self, value):
        with pytest.raises(BatchSchemaError, match=r"column 'x' .* belongs into \.metadata"):
            BatchedDataDict(x=value)

    def test_nested_and_sparse_tensors_are_refused_by_name(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
        for tensor in (nested, torch.eye(3).to_sparse()):
            with pytest.raises(BatchSchemaError, match="column 'x' is a nested or sparse tensor"):
                BatchedDataDict(x=tensor)

    def test_the_only_column_may_change_its_length(self):
        batch = BatchedDataDict(a=[1, 2])
        batch["a"] = [1, 2, 3]
        assert batch.size == 3

    def test_keys_are_strings(self):
        with pytest.raises(TypeError, match="named by strings, not by 0"):
            BatchedDataDict({0: [1]})


class TestRows:
    def test_slices_are_views(self, batch):
        part = batch.slice(2, 4)
        assert type(part) is SlicedDataDict
        part["input_ids"].zero_()
        assert batch["input_ids"][2:4].eq(0).all()
        assert part.metadata["step"] == 3
        assert part["logprobs"].dtype == torch.bfloat16
        assert part["mask"].dtype == torch.bool

    @pytest.mark.parametrize(("start", "end"), [(-1, 3), (4, 3), (0, 7)])
    def test_slices_of_rows_that_are_not_there(self, batch, start, end):
        with pytest.raises(IndexError, match="not within the 6 rows"):
            batch.slice(start, end)

    def test_selections_are_copies_of_the_same_class(self, batch):
        part = batch.select_indices(torch.tensor([5, -6]))
        assert type(part) is BatchedDataDict
        assert part["input_ids"].tolist() == [[15, 16, 17], [0, 1, 2]]
        assert part["answer"].tolist() == [[5], None]
        assert part["log"] == [batch["log"][5], batch["log"][0]]
        assert_same(batch.select_indices([True] * 6), batch)
        part["input_ids"].zero_()
        assert batch["input_ids"][5].any()

    def test_reorder_undoes_a_selection(self, batch):
        order = [3, 1, 5, 0, 2, 4]
        assert_same(batch.select_indices(order).reorder_data(order), batch)

    def test_reorder_takes_only_permutations(self, batch):
        with pytest.raises(ValueError, match="not a permutation of 6 rows"):
            batch.reorder_data([0, 1, 2, 3, 4, 4])

    def test_repeats_do_not_share_objects(self, batch):
        repeated = batch.repeat_interleave(2)
        assert repeated["input_ids"][:, 0].tolist() == [0, 0, 3, 3, 6, 6, 9, 9, 12, 12, 15, 15]
        assert repeated["reward"].dtype == np.float32
        repeated["log"][0].append("answer")
        repeated["answer"][10].append("answer")
        assert len(repeated["log"][1]) == len(batch["log"][0]) == 1
        assert repeated["answer"][11] == batch["answer"][5] == [5]
        assert batch.repeat_interleave(0).size == 0
        with pytest.raises(ValueError, match="at least 0, not -1"):
            batch.repeat_interleave(-1)

    def test_chunk(self, batch):
        assert batch.chunk(1, 3)["input_ids"][:, 0].tolist() == [6, 9]
        with pytest.raises(ValueError, match="6 rows do not divide into 4 equal chunks"):
            batch.chunk(0, 4)
        with pytest.raises(IndexError, match="no chunk 3 of 3"):
            batch.chunk(3, 3)

    @pytest.mark.parametrize("parts", [1, 2, 4, 6, 8])
    def test_shard_then_concat(self, batch, parts):
        shards = batch.shard(parts)
        assert [type(shard) for shard in shards] == [SlicedDataDict] * parts
        assert_same(BatchedDataDict.concat(shards), batch)

    def test_truncate(self, batch):
        before = batch["input_ids"]
        batch.truncate_tensors(1, 2, keys=["input_ids"]).truncate_tensors(2, 1)
        assert batch["input_ids"].shape == (6, 2)
        assert batch["logprobs"].shape == (6, 3)
        assert batch["input_ids"].data_ptr() == before.data_ptr()
        assert batch.truncate_tensors(dim=1, truncated_len=9)["logprobs"].shape == (6, 3)
        with pytest.raises(ValueError, match="rows are dimension 0"):
            batch.truncate_tensors(0, 2)

    def test_to_keeps_what_is_no_tensor(self, batch):
        moved = batch.to("meta")
        assert moved is batch
        assert batch["input_ids"].is_meta
        assert isinstance(batch["reward"], np.ndarray)
        assert len(batch.to_device("meta")["log"]) == 6


class TestJoining:
    def test_padding_per_key_left_and_right(self):
        parts = [
            {"a": torch.ones(1, 2), "b": torch.ones(1, 2, 2)},
            {"a": torch.ones(2, 3), "b": torch.ones(2, 3, 2)},
        ]
        joined = BatchedDataDict.from_batches(parts, {"a": 7}, pad_side={"a": "left"})
        assert joined["a"].tolist() == [[7, 1, 1], [1, 1, 1], [1, 1, 1]]
        assert joined["b"][0].tolist() == [[1, 1], [1, 1], [0, 0]]
        assert BatchedDataDict.from_batches(parts, pad_side="left")["b"][0, 0].tolist() == [0, 0]

    def test_padding_keeps_bfloat16_and_bool(self):
        parts = [
            {"a": torch.ones(1, n, dtype=torch.bfloat16), "m": torch.ones(1, n, dtype=torch.bool)}
            for n in (1, 3)
        ]
        joined = BatchedDataDict.from_batches(parts)
        assert joined["a"].dtype == torch.bfloat16
        assert joined["m"].tolist() == [[True, False, False], [True] * 3]

    def test_the_first_metadata_wins_where_it_is_asked_for(self):
        joined = BatchedDataDict.from_batches(
            [BatchedDataDict(a=[1], metadata={"x": 1}), BatchedDataDict(a=[2], metadata={"x": 2, "y": 3})],
            metadata="first",
        )
        assert joined.metadata == {"x": 1, "y": 3}

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            ({"b": torch.ones(1, 2)}, "batch 1 has columns b, the first one with rows a"),
            (
                {"a": torch.ones(1, 2, dtype=torch.bfloat16)},
                "column 'a': torch.bfloat16 of 2 dimensions does not join",
            ),
            ({"a": torch.ones(1)}, "1 dimensions does not join"),
            ({"a": [1]}, r"column 'a' is of several kinds: \['list', 'tensor'\]"),
        ],
    )
    def test_batches_that_do_not_fit(self, other, message):
        with pytest.raises(BatchSchemaError, match=message):
            BatchedDataDict.from_batches([{"a": torch.ones(1, 2)}, other])

    def test_arrays_are_neither_converted_nor_padded(self):
        parts = [{"a": np.ones(1, np.float32)}, {"a": np.ones(1, np.float64)}]
        with pytest.raises(BatchSchemaError, match="nothing is converted or padded silently"):
            BatchedDataDict.from_batches(parts)

    def test_concat_never_pads(self):
        with pytest.raises(BatchSchemaError, match=r"from_batches\(\) pads them"):
            BatchedDataDict.concat([{"a": torch.ones(1, 2)}, {"a": torch.ones(1, 3)}])

    def test_nothing_to_join(self):
        with pytest.raises(ValueError, match="at least one batch"):
            BatchedDataDict.from_batches([])

    def test_an_unknown_side(self):
        with pytest.raises(ValueError, match="'left' or 'right', not 'top'"):
            BatchedDataDict.from_batches([{"a": [1]}], pad_side="top")


class TestPickling:
    @pytest.mark.smoke
    def test_round_trip_within_the_pickle(self, batch):
        twin = pickle.loads(pickle.dumps(batch, protocol=5))
        assert type(twin) is BatchedDataDict
        assert_same(twin, batch)
        assert twin["logprobs"].dtype == torch.bfloat16
        assert twin.metadata["step"] == 3

    def test_objects_are_unpickled_and_memory_is_lent_only_where_that_is_asked_for(self):
        encoded = BatchedDataDict(x=["a"]).encode()
        with pytest.raises(DecodeError, match="allow_pickle"):
            BatchedDataDict.decode(encoded.header, encoded.buffers)
        found = BatchedDataDict.decode(encoded.header, encoded.buffers, allow_pickle=True)
        assert found["x"] == ["a"]
        large = torch.ones(1000, 100)
        encoded = BatchedDataDict(x=large).encode()
        large.zero_()
        assert BatchedDataDict.decode(encoded.header, encoded.buffers)["x"].all()

    def test_large_columns_travel_in_the_memory_they_have(self):
        batch = BatchedDataDict(x=torch.ones(300, 1000), y=torch.ones(300))
        buffers = []
        payload = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
        sizes = [buffer.raw().nbytes for buffer in buffers]
        assert sizes == [1_200_000, 1216]
        assert len(payload) < 2000
        assert np.frombuffer(buffers[0], np.uint8).ctypes.data == batch["x"].data_ptr()

    def test_a_slice_sends_only_its_own_rows(self):
        batch = BatchedDataDict(x=torch.ones(1000, 100))
        assert len(pickle.dumps(batch.slice(0, 10), protocol=5)) < 6000

    def received(self, batch):
        """The batch as a reader has it: in memory that others read too."""
        buffers = []
        payload = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
        shared = [read_only_copy(buffer) for buffer in buffers]
        return shared, lambda: pickle.loads(payload, buffers=shared)

    def test_a_write_never_reaches_another_reader(self, batch):
        shared, read = self.received(batch)
        before = [bytes(buffer) for buffer in shared]
        first, second = read(), read()
        for column in ("input_ids", "logprobs", "mask"):
            first[column].zero_()
            first.slice(0, 2)[column].fill_(1)
        first["log"][0][0]["ids"].fill_(9)
        first.metadata["policy"].zero_()
        second.slice(1, 3)["input_ids"].zero_()
        second.shard(2)[1]["logprobs"].zero_()
        second.select_indices([1, 1])["input_ids"].zero_()
        second.copy()["logprobs"].zero_()
        BatchedDataDict.concat([second])["logprobs"].zero_()
        copy.deepcopy(second)["logprobs"].zero_()
        second.writable()["reward"][:] = 5
        assert [bytes(buffer) for buffer in shared] == before
        assert_same(read(), batch)

    def test_arrays_stay_in_place_and_are_read_only(self, batch):
        _, read = self.received(batch)
        twin = read()
        with pytest.raises(ValueError, match="read-only"):
            twin["reward"][0] = 1
        assert twin.slice(0, 2)["reward"].base is not None
        assert twin.writable()["reward"].flags.writeable
        assert twin.select_indices([0])["reward"].flags.writeable

    def test_a_borrowed_column_lies_in_the_shared_memory(self, batch):
        shared, read = self.received(batch)
        borrowed = read().borrow("input_ids")
        spans = [(np.frombuffer(b, np.uint8).ctypes.data, len(bytes(b))) for b in shared]
        assert any(start <= borrowed.data_ptr() < start + size for start, size in spans)
        assert borrowed.equal(batch["input_ids"])

    def test_a_second_look_is_the_same_private_copy(self, batch):
        _, read = self.received(batch)
        twin = read()
        twin["input_ids"].zero_()
        assert twin["input_ids"].eq(0).all()
        assert twin.slice(0, 1)["input_ids"].eq(0).all()

    def test_what_was_received_can_be_sent_on(self, batch):
        _, read = self.received(batch)
        _, read_again = self.received(read().slice(1, 5))
        assert_same(read_again(), batch.slice(1, 5))

    @pytest.mark.hostile
    @pytest.mark.parametrize("how", ["lent", "pickled", "encoded"])
    @pytest.mark.parametrize("kind", ["tensor", "ragged", "packed"])
    def test_a_write_to_what_was_sent_on_in_this_process_reaches_no_other_reader(self, how, kind):
        rows = torch.arange(300_000.0)
        columns = {"tensor": rows, "ragged": RaggedTensor(rows, [300_000]), "packed": PackedTensor([rows])}
        _, read = self.received(BatchedDataDict(x=columns[kind]))
        if how == "pickled":
            buffers = []
            payload = pickle.dumps(read(), protocol=5, buffer_callback=buffers.append)
            twin = pickle.loads(payload, buffers=buffers)
        else:
            encoded = read().encode(borrow=how == "lent")
            twin = BatchedDataDict.decode(encoded.header, encoded.buffers)
        found = twin["x"] if kind == "tensor" else next(iter(twin["x"]))
        assert found.equal(rows)
        found.zero_()
        assert read() == BatchedDataDict(x=columns[kind])

    def test_attributes_travel_along(self, batch):
        batch.micro_batch_indices = [[[0, 6]]]
        batch.note = "mine"
        twin = pickle.loads(pickle.dumps(batch))
        assert twin.micro_batch_indices == [[[0, 6]]]
        assert twin.note == "mine"
