"""Batches in hands that mean no good, or do not look: what cannot be right is refused, by name."""

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
import threading
from unittest import mock

import numpy as np
import pytest
import torch
from batches import assert_same, same

from raycrew.tensor_transport import (
    BatchedDataDict,
    BatchSchemaError,
    PackedTensor,
    RaggedTensor,
    ShardedBatch,
    SlicedDataDict,
    pack,
)

pytestmark = pytest.mark.hostile

PACKED = {"max_tokens_per_microbatch": 5, "input_lengths_key": "lengths"}
DYNAMIC = {"max_tokens_per_microbatch": 10, "input_key": "ids", "input_lengths_key": "lengths"}


def batch_of(lengths):
    return BatchedDataDict(
        {
            "ids": torch.arange(len(lengths) * 5).view(len(lengths), 5),
            "lengths": torch.tensor(lengths),
            "text": [[f"row {i}"] for i in range(len(lengths))],
        },
        metadata={"step": 1},
    )


def planned(**how):
    (shard,), _ = batch_of([5, 1, 4, 2, 3, 3]).shard_by_batch_size(1, **how)
    return shard


class TestPlans:
    @pytest.mark.parametrize(
        "change",
        [
            lambda b: b.reorder_data([5, 4, 3, 2, 1, 0]),
            lambda b: b.select_indices([0, 0, 1, 1, 2, 2]),
            lambda b: b.select_indices(slice(None)),
            lambda b: b.slice(0, 6),
            lambda b: b.shard(1)[0],
            lambda b: b.chunk(0, 1),
            lambda b: b.repeat_interleave(1),
            lambda b: type(b).concat([b]),
            lambda b: type(b).from_batches([b]),
        ],
    )
    def test_other_rows_have_no_plan(self, change):
        for shard in (planned(sequence_packing_args=PACKED), planned(dynamic_batching_args=DYNAMIC)):
            found = change(shard)
            for use in (
                found.make_microbatch_iterator_for_packable_sequences,
                found.make_microbatch_iterator_with_dynamic_shapes,
                found.get_microbatch_iterator_dynamic_shapes_len,
                found.get_microbatch_iterator_for_packable_sequences_len,
            ):
                with pytest.raises(ValueError, match="does not outlast a selection or reordering"):
                    use()
            assert found.elem_counts_per_gb is None

    @pytest.mark.parametrize(
        "keep",
        [copy.copy, copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b)), lambda b: b.writable()],
    )
    def test_the_same_rows_keep_it(self, keep):
        shard = planned(sequence_packing_args=PACKED)
        for microbatch in keep(shard).make_microbatch_iterator_for_packable_sequences():
            assert int(microbatch["lengths"].sum()) <= 5

    def test_a_plan_for_another_number_of_rows_is_refused(self):
        shard = planned(sequence_packing_args=PACKED)
        plan = (shard.micro_batch_indices, shard.micro_batch_lengths, shard.elem_counts_per_gb)
        for key in list(shard):
            del shard[key]
        shard["lengths"] = [1, 2]
        with pytest.raises(ValueError, match="no microbatches are planned"):
            shard.make_microbatch_iterator_for_packable_sequences()
        shard.micro_batch_indices, shard.micro_batch_lengths, shard.elem_counts_per_gb = plan
        with pytest.raises(ValueError, match="planned for 6 rows, and the batch has 2"):
            shard.make_microbatch_iterator_for_packable_sequences()
        with pytest.raises(ValueError, match="planned for 6 rows, and the batch has 2"):
            shard.get_batch(0)

    def test_an_empty_batch_is_sharded_and_iterated(self):
        for how in ({"sequence_packing_args": PACKED}, {"dynamic_batching_args": DYNAMIC}, {}):
            shards, order = batch_of([]).shard_by_batch_size(2, **how)
            assert [s.size for s in shards] == [0, 0] and list(order) == []


class TestColumns:
    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            (np.ma.masked_array([1, 2], [True, False]), "numpy MaskedArray.*its mask would be lost"),
            (np.ma.masked_all((2, 3)), "numpy MaskedArray"),
            (np.matrix([[1], [2]]), "numpy matrix"),
            (np.rec.fromarrays([[1, 2]], names="a"), "numpy recarray"),
            (torch.eye(2).to_sparse(), "nested or sparse"),
            (torch.eye(2).to_sparse_csr(), "nested or sparse"),
            (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantised"),
            (torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])), "of class MaskedTensor"),
            (torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})), "of class Mine"),
            (
                PackedTensor([torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), None]),
                "quantised",
            ),
            (np.array(3), "a ndarray without a batch dimension"),
            ({"a": 1}, "a dict without a batch dimension"),
            ("text", "a str without a batch dimension"),
        ],
    )
    @pytest.mark.filterwarnings("ignore")
    def test_what_would_lose_its_meaning_is_refused_by_name(self, bad, message):
        for insert in (
            lambda: BatchedDataDict(x=bad),
            lambda: BatchedDataDict({"x": bad}),
            lambda: BatchedDataDict().update(x=bad),
            lambda: BatchedDataDict.concat([{"x": bad}]),
            lambda: BatchedDataDict.from_batches([{"x": bad}]),
        ):
            with pytest.raises(BatchSchemaError, match=rf"(?s)column 'x' is .*{message}") as caught:
                insert()
            assert caught.value.key == "x"

    def test_masked_arrays_are_refused_wherever_arrays_come_in(self):
        masked = np.ma.masked_array([0, 1], [True, False])
        for use in (
            lambda: batch_of([1, 2]).select_indices(masked),
            lambda: batch_of([1, 2]).reorder_data(masked),
            lambda: pack(masked, 5),
            lambda: RaggedTensor(torch.ones(1), masked),
            lambda: RaggedTensor.from_padded(torch.ones(2, 2), masked),
        ):
            with pytest.raises(TypeError, match="is a numpy MaskedArray, not a plain array"):
                use()

    def test_parameters_and_mapped_files_are_columns(self, tmp_path):
        mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(2, 3))
        mapped[:] = 7
        batch = BatchedDataDict(x=mapped, y=torch.nn.Parameter(torch.ones(2, 1)))
        twin = pickle.loads(pickle.dumps(batch))
        assert type(twin["x"]) is np.ndarray and (twin["x"] == 7).all()
        assert twin["y"].equal(torch.ones(2, 1)) and not twin["y"].requires_grad

    @pytest.mark.parametrize(
        "column",
        [
            np.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i4"), ("b", "f8")]),
            np.array([1, 2], dtype=">i4"),
            np.array(["2020-01-01", "NaT"], dtype="M8[D]"),
            np.array([2**70, -(2**70)], dtype=object),
            [2**200, -1],
            torch.zeros(2, 0),
            torch.zeros(2, 0, 3, dtype=torch.bfloat16),
            torch.tensor([2**63 - 1, -(2**63)]),
            torch.ones(2, 3).bfloat16(),
            torch.tensor([1 + 2j, 3j]).conj(),
        ],
    )
    def test_unusual_columns_survive_every_way(self, column):
        batch = BatchedDataDict(x=column)
        for change in (
            lambda b: pickle.loads(pickle.dumps(b)),
            lambda b: BatchedDataDict.concat(b.shard(2)),
            lambda b: b.select_indices([1, 0]).reorder_data([1, 0]),
            lambda b: b.repeat_interleave(2).select_indices([0, 2]),
            copy.deepcopy,
        ):
            found = change(batch)
            assert found == batch and type(found["x"]) is type(column), column

    def test_row_numbers_beyond_64_bits_are_no_negative_ones(self):
        with pytest.raises(IndexError, match="row 18446744073709551615 is out of range for 2 rows"):
            batch_of([1, 2]).select_indices(np.array([2**64 - 1], np.uint64))

    @pytest.mark.parametrize("bad", [[-1, 2], [2**40, 1]])
    def test_lengths_that_are_none(self, bad):
        batch = batch_of([1, 2])
        batch["lengths"] = torch.tensor(bad)
        for how in ({"sequence_packing_args": PACKED}, {"dynamic_batching_args": DYNAMIC}):
            with pytest.raises(BatchSchemaError, match="not those of sequences"):
                batch.shard_by_batch_size(1, **how)


class TestPadding:
    @pytest.mark.parametrize(
        ("dtype", "value"),
        [
            (torch.uint8, -100),
            (torch.int64, 0.5),
            (torch.int8, 128),
            (torch.bool, 2),
            (torch.int32, float("nan")),
            (torch.int32, float("inf")),
            (torch.int64, 2**63),
            (torch.bfloat16, 257),
            (torch.float32, 2**24 + 1),
            (torch.float16, -1e9),
            (torch.float16, 1e-12),
            (torch.float32, 10**400),
            (torch.float8_e4m3fn, float("inf")),
            (torch.float8_e4m3fn, 1000.0),
            (torch.float32, "0"),
            (torch.int64, torch.tensor(3)),
        ],
    )
    def test_a_value_that_the_dtype_does_not_hold_is_refused(self, dtype, value):
        parts = [{"x": torch.ones(1, n).to(dtype)} for n in (1, 2)]
        with pytest.raises(
            BatchSchemaError, match=r"column 'x' (of torch\.\w+ does not hold|is padded with)"
        ):
            BatchedDataDict.from_batches(parts, {"x": value})
        with pytest.raises(BatchSchemaError, match=r"does not hold|is padded with"):
            RaggedTensor(torch.ones(3).to(dtype), [1, 2]).to_padded(value)

    @pytest.mark.parametrize(
        ("dtype", "value"),
        [
            (torch.uint8, 255),
            (torch.int64, -100.0),
            (torch.int64, 2**63 - 1),
            (torch.bool, True),
            (torch.bfloat16, -1e9),
            (torch.float32, 0.1),
            (torch.float16, float("-inf")),
            (torch.float32, float("nan")),
            (torch.complex64, 0.5),
            (torch.float8_e5m2, 1),
        ],
    )
    def test_a_value_that_it_holds_is_there(self, dtype, value):
        parts = [{"x": torch.ones(1, n).to(dtype)} for n in (1, 2)]
        found = BatchedDataDict.from_batches(parts, {"x": value})["x"]
        expected = torch.tensor([value], dtype=torch.float64 if isinstance(value, float) else None).to(dtype)
        assert found.dtype == dtype and same(found[0, 1:].clone(), expected)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"pad_value_dict": {"idz": 1}}, "pad_value_dict names 'idz'.*did you mean 'ids'"),
            ({"pad_side": {"id": "left"}}, "pad_side names 'id'.*did you mean 'ids'"),
            ({"pad_value_dict": {"zzz": 1}}, "there are only ids, lengths, text$"),
            ({"metadata": {"stp": "first"}}, "metadata names 'stp'.*did you mean 'step'"),
            ({"metadata": "last"}, "'max', or a function, not by 'last'"),
        ],
    )
    def test_names_that_would_be_ignored(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            BatchedDataDict.from_batches([batch_of([1]), batch_of([2])], **arguments)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                {"sequence_packing_args": PACKED | {"algoritm": "first_fit"}},
                "'algoritm'.*did you mean 'algorithm'",
            ),
            (
                {"dynamic_batching_args": DYNAMIC | {"sequence_length_rounds": 8}},
                "mean 'sequence_length_round'",
            ),
            (
                {"sequence_packing_args": PACKED | {"input_lengths_key": "length"}},
                "input_lengths_key names 'length'.*did you mean 'lengths'",
            ),
            (
                {"sequence_packing_args": PACKED | {"max_tokens_per_microbatch": True}},
                "is a positive integer, not True",
            ),
        ],
    )
    def test_options_that_would_be_ignored(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            batch_of([1, 2]).shard_by_batch_size(1, **arguments)


class TestJoining:
    def parts(self):
        return [BatchedDataDict(a=[i], metadata={"step": i, "of": torch.ones(2)}) for i in range(3)]

    def test_metadata_that_differs_is_refused(self):
        for join in (BatchedDataDict.concat, BatchedDataDict.from_batches):
            with pytest.raises(BatchSchemaError, match="metadata 'step' differs between batches: 0 and 1"):
                join(self.parts())

    def test_or_joined_by_a_rule(self):
        join = BatchedDataDict.concat
        assert join(self.parts(), metadata="first").metadata["step"] == 0
        assert join(self.parts(), metadata={"step": max}).metadata["step"] == 2
        assert join(self.parts(), metadata={"step": "first"}).metadata["of"].equal(torch.ones(2))
        assert join(self.parts(), metadata=len).metadata == {"step": 3, "of": 3}
        with pytest.raises(BatchSchemaError, match="'step' differs"):
            join(self.parts(), metadata={"of": "first"})

    def test_metadata_that_only_some_have_is_kept(self):
        found = BatchedDataDict.concat([{"a": [1]}, BatchedDataDict(a=[2], metadata={"x": 1})])
        assert found.metadata == {"x": 1}

    def test_batches_without_rows_may_lack_columns(self):
        full, none = batch_of([1, 2]), BatchedDataDict(metadata={"step": 1})
        some = BatchedDataDict(text=[])
        for parts in ([none, full], [full, none], [some, none, full, none, some]):
            assert_same(BatchedDataDict.from_batches(parts, {"ids": 3}), full)
        assert BatchedDataDict.concat([none, some]).size == 0
        with pytest.raises(BatchSchemaError, match="batch 1 has columns other"):
            BatchedDataDict.concat([full, {"other": []}])
        with pytest.raises(BatchSchemaError, match="batch 1 has columns text, the first one with rows"):
            BatchedDataDict.concat([full, {"text": ["a"]}])

    def test_what_is_no_list_of_batches(self):
        with pytest.raises(TypeError, match="pass a list of them, not one batch"):
            BatchedDataDict.concat(batch_of([1]))
        with pytest.raises(TypeError, match="part 0 is a list"):
            BatchedDataDict.concat([[1]])


class TestRepeating:
    def rows(self, batch):
        return [batch["text"], batch["objects"], batch["packed"].tensors]

    def test_rows_share_nothing_unless_it_is_asked_for(self):
        batch = BatchedDataDict(
            text=[["a"]],
            objects=np.array([["a"], None], dtype=object)[:1],
            packed=PackedTensor([torch.ones(2)]),
        )
        for first, second in self.rows(batch.repeat_interleave(2)):
            assert first is not second
        repeated = batch.repeat_interleave(2)
        repeated["packed"].tensors[0].zero_()
        repeated["text"][0].append("b")
        assert repeated["packed"].tensors[1].sum() == 2 == batch["packed"].tensors[0].sum()
        assert repeated["text"][1] == batch["text"][0] == ["a"]
        for first, second in self.rows(batch.repeat_interleave(2, share=True)):
            assert first is second

    def test_named_columns_are_shared_and_others_are_not(self):
        batch = BatchedDataDict(
            text=[["a"]], objects=np.array([None], dtype=object), packed=PackedTensor([torch.ones(2)])
        )
        batch["objects"][0] = ["x"]
        shared = {"packed", "objects"}
        for (first, second), name in zip(
            self.rows(batch.repeat_interleave(2, share=shared)), ("text", "objects", "packed"), strict=True
        ):
            assert (first is second) == (name in shared)
        with pytest.raises(KeyError, match="no columns image; "):
            batch.repeat_interleave(2, share=["image"])
        with pytest.raises(TypeError, match="not by the one string 'packed'"):
            batch.repeat_interleave(2, share="packed")
        for times in (-1, 2.0, True, torch.tensor([1])):
            with pytest.raises(ValueError, match="how often rows are repeated is an integer of at least 0"):
                batch.repeat_interleave(times)

    def test_what_can_not_be_copied_is_named(self):
        grown = torch.ones(1, requires_grad=True) * 2
        for objects in ([grown], [threading.Lock()]):
            batch = BatchedDataDict(a=[1], x=objects)
            with pytest.raises(BatchSchemaError, match=r"column 'x' can't be repeated.*share=") as info:
                batch.repeat_interleave(2)
            assert info.value.key == "x"
            assert batch.repeat_interleave(2, share=["x"])["x"][1] is objects[0]


@dataclasses.dataclass
class Sample:
    value: object
    note: str = dataclasses.field(default="", compare=False)


class Mine(BatchedDataDict):
    """With an `__init__` that takes other arguments."""

    def __init__(self, columns, tokenizer):
        super().__init__(columns)
        self.tokenizer = tokenizer
        self.cache = None


class TestSubclasses:
    @pytest.mark.parametrize(
        "change",
        [
            lambda b: b.select_indices([0, 1, 2, 3]),
            lambda b: b.slice(0, 4),
            lambda b: b.shard(1)[0],
            lambda b: b.chunk(0, 1),
            lambda b: Mine.concat(b.shard(3)),
            lambda b: Mine.from_batches(b.shard(3)),
            lambda b: b.repeat_interleave(1),
            lambda b: b.writable(),
            lambda b: b.get_batch(0, 4),
            lambda b: pickle.loads(pickle.dumps(b)),
            lambda b: Mine.decode(b.encode().header, b.encode().buffers, allow_pickle=True),
            copy.copy,
            copy.deepcopy,
            lambda b: b.shard_by_batch_size(1).shards[0],
            lambda b: next(b.make_microbatch_iterator(4)),
        ],
    )
    def test_survive(self, change):
        mine = Mine({"a": [1, 2, 3, 4]}, "words")
        found = change(mine)
        assert type(found) is Mine
        assert (found.tokenizer, found.cache) == ("words", None)
        assert found == mine

    def test_attributes_are_joined_as_metadata_is(self):
        parts = [Mine({"a": [1]}, name) for name in ("words", "letters")]
        with pytest.raises(BatchSchemaError, match="'tokenizer' differs"):
            Mine.concat(parts)
        for rule in ("same", "concat", "list", "max"):
            with pytest.raises(BatchSchemaError, match="'tokenizer' differs"):
                Mine.concat(parts, metadata=rule)
        assert Mine.concat(parts, metadata="first").tokenizer == "words"

    @pytest.mark.parametrize("name", ["Answers", "_answers", "answers"])
    def test_attributes_of_any_name_travel_along(self, name):
        batch = batch_of([1, 2])
        setattr(batch, name, 5)
        for found in (batch[:1], copy.copy(batch), pickle.loads(pickle.dumps(batch))):
            assert getattr(found, name) == 5

    def test_parts_of_a_plain_batch_are_slices(self):
        batch = batch_of([1, 2])
        assert type(batch.slice(0, 1)) is SlicedDataDict
        assert type(batch.slice(0, 2).slice(0, 1)) is SlicedDataDict


class TestEquality:
    def test_by_columns_and_values(self):
        batch = batch_of([1, 2])
        assert (batch == batch_of([1, 2])) is True
        assert (batch != batch_of([1, 2])) is False
        assert (batch == batch_of([1, 3])) is False
        assert batch == batch.slice(0, 2)
        assert batch == batch.get_dict()
        assert batch != 3
        assert batch in [batch_of([5]), batch_of([1, 2])]
        with pytest.raises(TypeError, match="unhashable"):
            hash(batch)

    @pytest.mark.parametrize(
        ("a", "b", "equal"),
        [
            (torch.ones(1), torch.ones(1).double(), False),
            (torch.ones(1, 2), torch.ones(1, 1), False),
            (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
            (torch.ones(1).to(torch.float8_e5m2), torch.ones(1).to(torch.float8_e5m2), True),
            (np.array([np.nan]), np.array([np.nan]), True),
            (np.ones(1), np.zeros(1), False),
            (np.ones(1), np.ones(1, np.float32), False),
            (np.ones(1), torch.ones(1, dtype=torch.float64), False),
            ([1], [1.0], False),
            ([float("nan")], [float("nan")], True),
            ([{"t": torch.ones(2)}], [{"t": torch.ones(2)}], True),
            ([{"t": torch.ones(2)}], [{"t": torch.zeros(2)}], False),
            ([(1,)], [[1]], False),
            ([np.float32("nan")], [np.float32("nan")], True),
            ([np.datetime64("NaT")], [np.datetime64("NaT")], True),
            ([np.float32(1)], [np.float64(1)], False),
            ([Sample(torch.ones(2))], [Sample(torch.ones(2))], True),
            ([Sample(torch.ones(2))], [Sample(torch.zeros(2))], False),
            ([Sample(torch.ones(2))], [Sample(torch.ones(3))], False),
            ([Sample(float("nan"))], [Sample(float("nan"))], True),
            ([Sample(1, note="a")], [Sample(1, note="b")], True),
            ([torch.eye(2).to_sparse()], [torch.eye(2).to_sparse()], True),
            ([torch.eye(2).to_sparse()], [torch.ones(2, 2).to_sparse()], False),
            ([torch.eye(2).to_sparse()], [torch.eye(2)], False),
            (torch.ones(2, device="meta"), torch.ones(2), False),
            (RaggedTensor(torch.ones(2), [2]), RaggedTensor(torch.ones(2), [2]), True),
            (PackedTensor([None]), PackedTensor([torch.ones(1)]), False),
            (torch.empty(1, device="meta"), torch.empty(1, device="meta"), True),
            (torch.empty(1, device="meta"), torch.empty(1), False),
        ],
    )
    def test_of_columns(self, a, b, equal):
        assert (BatchedDataDict(x=a) == BatchedDataDict(x=b)) is equal

    def test_of_other_columns_or_with_something_else(self):
        one, both = BatchedDataDict(a=[1]), BatchedDataDict(a=[1], b=[2])
        assert one != both and both != one and one == BatchedDataDict(a=[1]) == {"a": [1]}
        assert one == mock.ANY and one != 5 and one != [1]

    def test_nothing_is_copied_to_compare(self):
        batch = pickle.loads(pickle.dumps(batch_of([1, 2])))
        assert batch == batch_of([1, 2])
        assert BatchedDataDict() == {} and BatchedDataDict(a=[1]) != {}


class TestSharding:
    def test_one_type_whatever_was_asked_for(self):
        batch = batch_of([5, 1, 4, 2])
        for how in ({}, {"sequence_packing_args": PACKED}, {"dynamic_batching_args": DYNAMIC}):
            found = batch.shard_by_batch_size(2, **how)
            assert type(found) is ShardedBatch
            shards, order = found
            assert shards is found.shards and order is found.order
            assert BatchedDataDict.concat(found).reorder_data(found.order) == batch
            assert BatchedDataDict.concat(found.shards).reorder_data(order) == batch

    def test_it_can_not_be_taken_for_a_list(self):
        found = batch_of([5, 1, 4, 2]).shard_by_batch_size(2)
        assert found.shard(2) is found.shards
        with pytest.raises(ValueError, match="sharded into 2, and 3 shards are needed"):
            found.shard(3)
        with pytest.raises(TypeError, match=r"take \.shards\[0\], or \.order"):
            found[0]
        with pytest.raises(TypeError, match=r"take len\(\.shards\)"):
            len(found)
        assert found
        assert ShardedBatch.concat(found.shards) == batch_of([5, 1, 4, 2])

    def test_it_travels(self):
        found = batch_of([5, 1, 4, 2]).shard_by_batch_size(2, sequence_packing_args=PACKED)
        twin = pickle.loads(pickle.dumps(found))
        assert twin == found


def test_a_batch_is_equal_in_another_process(tmp_path):
    batch = batch_of([1, 2])
    batch["x"] = torch.ones(2, 3).bfloat16()
    (tmp_path / "batch").write_bytes(pickle.dumps(batch))
    script = (
        "import pickle, sys; b = pickle.load(open(sys.argv[1], 'rb')); b['x'] *= 2; "
        "pickle.dump(b.select_indices([1, 0]), open(sys.argv[1], 'wb'))"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "batch")], check=True, timeout=250, env=dict(os.environ)
    )
    found = pickle.loads((tmp_path / "batch").read_bytes()).reorder_data([1, 0])
    assert found["x"].equal(torch.full((2, 3), 2.0).bfloat16())
    del found["x"], batch["x"]
    assert found == batch
