import pickle

import numpy as np
import pytest
import torch
from batches import assert_same
from hypothesis import given
from hypothesis import strategies as st

from raycrew.tensor_transport import BatchedDataDict, BatchSchemaError, SlicedDataDict


def batch_of(lengths, width=None):
    width = width or max(lengths, default=1)
    return BatchedDataDict(
        {
            "ids": torch.arange(len(lengths) * width).view(len(lengths), width),
            "lengths": torch.tensor(lengths, dtype=torch.int32),
            "text": [f"row {i}" for i in range(len(lengths))],
            "reward": np.arange(len(lengths)),
        },
        metadata={"step": 1},
    )


def dynamic(budget, multiple=1):
    return {
        "max_tokens_per_microbatch": budget,
        "sequence_length_round": multiple,
        "input_key": "ids",
        "input_lengths_key": "lengths",
    }


def packed(budget, algorithm="modified_first_fit_decreasing", multiple=1):
    return {
        "max_tokens_per_microbatch": budget,
        "input_key": "ids",
        "input_lengths_key": "lengths",
        "algorithm": algorithm,
        "sequence_length_pad_multiple": multiple,
    }


class TestEven:
    def test_global_batches_are_split_one_by_one(self):
        batch = BatchedDataDict(problem=[0, 0, 1, 1, 2, 2, 3, 3], metadata={"step": 1})
        assert [s["problem"] for s in batch.shard_by_batch_size(2).shards] == [[0, 0, 1, 1], [2, 2, 3, 3]]
        shards = batch.shard_by_batch_size(2, batch_size=4).shards
        assert [s["problem"] for s in shards] == [[0, 0, 2, 2], [1, 1, 3, 3]]
        assert [type(s) for s in shards] == [SlicedDataDict] * 2
        assert shards[1].metadata == {"step": 1}
        assert shards[1].get_batch(1, batch_size=2)["problem"] == [3, 3]

    def test_whole_runs_are_views(self):
        batch = batch_of([3] * 6)
        second = batch.shard_by_batch_size(3).shards[1]
        assert second["ids"].data_ptr() == batch["ids"][2:].data_ptr()

    @given(st.integers(0, 40), st.integers(1, 12))
    def test_uneven_shards_differ_by_at_most_one_row(self, size, shards):
        batch = BatchedDataDict(x=list(range(size)))
        parts = batch.shard_by_batch_size(shards, allow_uneven_shards=True).shards
        sizes = [part.size for part in parts]
        assert len(parts) == shards
        assert max(sizes) - min(sizes) <= 1
        assert BatchedDataDict.concat(parts)["x"] == list(range(size))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"shards": 4}, "6 rows does not divide into 4 shards"),
            ({"shards": 2, "batch_size": 4}, "6 rows are not a multiple of batch_size 4"),
            ({"shards": 0}, "at least one shard"),
            ({"shards": 2, "batch_size": 6, "allow_uneven_shards": True}, "leave batch_size out"),
            (
                {"shards": 2, "dynamic_batching_args": dynamic(8), "sequence_packing_args": packed(8)},
                "exclude each other",
            ),
            (
                {"shards": 2, "dynamic_batching_args": dynamic(0)},
                "max_tokens_per_microbatch is a positive integer",
            ),
            ({"shards": 2, "dynamic_batching_args": dynamic(3)}, "a row of 4 tokens, rounded up, is over"),
            ({"shards": 2, "sequence_packing_args": packed(3)}, "does not fit a bin of 3"),
            ({"shards": 2, "sequence_packing_args": packed(8, "magic")}, "unknown packing algorithm"),
        ],
    )
    def test_what_cannot_be(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            batch_of([4] * 6).shard_by_batch_size(**arguments)

    def test_lengths_are_integers(self):
        batch = batch_of([4] * 4)
        batch["lengths"] = [1.5] * 4
        with pytest.raises(BatchSchemaError, match="column 'lengths' does not hold one length per row"):
            batch.shard_by_batch_size(2, sequence_packing_args=packed(8))


class TestDynamic:
    @given(
        st.integers(1, 4),
        st.integers(1, 3),
        st.integers(1, 3),
        st.sampled_from([1, 4, 8]),
        st.integers(0, 2**32 - 1),
    )
    def test_plans(self, shards, per_shard, batches, multiple, seed):
        size = shards * per_shard * batches
        lengths = np.random.default_rng(seed).integers(1, 20, size).tolist()
        batch = batch_of(lengths, width=20)
        parts, order = batch.shard_by_batch_size(
            shards, size // batches, dynamic_batching_args=dynamic(48, multiple)
        )
        assert_same(BatchedDataDict.concat(parts).reorder_data(order), batch)
        for part in parts:
            assert part.micro_batch_indices == parts[0].micro_batch_indices
            assert part.micro_batch_lengths == parts[0].micro_batch_lengths
            for i in range(batches):
                global_batch = part.get_batch(i, per_shard)
                assert set(global_batch["reward"]) <= set(
                    range(i * size // batches, (i + 1) * size // batches)
                )
                microbatches = list(global_batch.make_microbatch_iterator_with_dynamic_shapes())
                assert len(microbatches) == global_batch.get_microbatch_iterator_dynamic_shapes_len()
                assert [row for m in microbatches for row in m["reward"]] == list(global_batch["reward"])
                for m in microbatches:
                    count, width = m["ids"].shape
                    assert count * width <= 48
                    assert int(m["lengths"].max()) <= width
                    assert width % multiple == 0 or width == 20

    def test_ranks_get_rows_of_similar_lengths(self):
        parts, _ = batch_of(list(range(1, 9))).shard_by_batch_size(2, dynamic_batching_args=dynamic(16))
        assert [part["lengths"].tolist() for part in parts] == [[1, 3, 5, 7], [2, 4, 6, 8]]
        assert parts[0].micro_batch_lengths == [[4, 8]]
        for part in parts:
            shapes = [m["ids"].shape for m in part.make_microbatch_iterator_with_dynamic_shapes()]
            assert shapes == [(2, 4), (2, 8)]

    def test_only_named_columns_are_truncated(self):
        batch = batch_of([2, 2], width=6)
        batch["features"] = torch.ones(2, 6)
        parts, _ = batch.shard_by_batch_size(1, dynamic_batching_args=dynamic(12))
        (m,) = parts[0].make_microbatch_iterator_with_dynamic_shapes(keys=["ids"])
        assert m["ids"].shape == (2, 2)
        assert m["features"].shape == (2, 6)


class TestPacked:
    @given(
        st.integers(1, 4),
        st.integers(1, 3),
        st.sampled_from(["modified_first_fit_decreasing", "concatenative", "best_fit_decreasing"]),
        st.sampled_from([1, 4]),
        st.integers(0, 2**32 - 1),
    )
    def test_plans(self, shards, batches, algorithm, multiple, seed):
        per_batch = shards * 6
        lengths = np.random.default_rng(seed).integers(1, 20, per_batch * batches).tolist()
        batch = batch_of(lengths, width=20)
        parts, order = batch.shard_by_batch_size(
            shards, per_batch, sequence_packing_args=packed(40, algorithm, multiple)
        )
        assert_same(BatchedDataDict.concat(parts).reorder_data(order), batch)
        for i in range(batches):
            global_batches = [part.get_batch(i) for part in parts]
            lengths_of = [g.get_microbatch_iterator_for_packable_sequences_len() for g in global_batches]
            assert len({count for count, _ in lengths_of}) == 1
            rows = sorted(row for g in global_batches for row in g["reward"].tolist())
            assert rows == list(range(i * per_batch, (i + 1) * per_batch))
            for g, (count, longest) in zip(global_batches, lengths_of, strict=True):
                microbatches = list(g.make_microbatch_iterator_for_packable_sequences())
                tokens = [
                    sum(-(-n // multiple) * multiple for n in m["lengths"].tolist()) for m in microbatches
                ]
                assert tokens == g.micro_batch_lengths[0]
                assert len(microbatches) == count
                assert max(tokens) == longest <= 40

    def test_tokens_are_balanced(self):
        lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 512).astype(int), 1, 2048)
        parts, _ = batch_of(lengths.tolist(), width=1).shard_by_batch_size(
            8, sequence_packing_args=packed(2048)
        )
        totals = [int(part["lengths"].sum()) for part in parts]
        assert max(totals) < 1.005 * sum(totals) / len(totals)

    def test_rows_need_not_divide_by_the_shards(self):
        parts, _ = batch_of([5] * 7).shard_by_batch_size(2, sequence_packing_args=packed(10))
        assert sorted(part.size for part in parts) == [3, 4]

    def test_too_few_rows(self):
        with pytest.raises(ValueError, match="2 sequences can't fill 4 bins"):
            batch_of([5] * 2).shard_by_batch_size(4, sequence_packing_args=packed(10))

    def test_the_plan_travels(self):
        parts, _ = batch_of([5] * 8).shard_by_batch_size(2, 4, sequence_packing_args=packed(10))
        twin = pickle.loads(pickle.dumps(parts[0]))
        assert type(twin) is SlicedDataDict
        assert twin.micro_batch_lengths == parts[0].micro_batch_lengths
        assert twin.get_batch(1)["reward"].tolist() == parts[0].get_batch(1)["reward"].tolist()


class TestIterators:
    def test_fixed(self):
        batch = batch_of([3] * 6)
        assert [m["reward"].tolist() for m in batch.make_microbatch_iterator(2)] == [[0, 1], [2, 3], [4, 5]]
        assert batch.get_microbatch_iterator_len(2) == 3
        with pytest.raises(ValueError, match="6 rows are not a multiple of a microbatch size of 4"):
            batch.make_microbatch_iterator(4)

    def test_nothing_planned(self):
        with pytest.raises(ValueError, match="no microbatches are planned"):
            batch_of([3] * 6).make_microbatch_iterator_with_dynamic_shapes()

    def test_several_global_batches(self):
        parts, _ = batch_of([5] * 8).shard_by_batch_size(2, 4, sequence_packing_args=packed(10))
        with pytest.raises(ValueError, match="planned for 2 global batches"):
            parts[0].make_microbatch_iterator_for_packable_sequences()

    def test_global_batches_that_are_not_there(self):
        batch = batch_of([5] * 8)
        with pytest.raises(ValueError, match="batch_size is needed"):
            batch.get_batch(0)
        with pytest.raises(IndexError):
            batch.get_batch(2, 4)
        parts, _ = batch.shard_by_batch_size(2, 4, sequence_packing_args=packed(10))
        with pytest.raises(IndexError, match="no global batch 2 of 2"):
            parts[0].get_batch(2)
