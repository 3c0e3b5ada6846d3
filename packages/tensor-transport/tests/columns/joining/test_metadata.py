"""Metrics of shards as those of the whole batch."""

import math
from typing import ClassVar

import numpy as np
import pytest
import torch
from batches import same
from hypothesis import given
from hypothesis import strategies as st

from raycrew.tensor_transport import BatchedDataDict, BatchSchemaError
from raycrew.tensor_transport._columns.joining.metadata import join_metadata


def joined(values, rules, rows=None):
    rows = [1] * len(values) if rows is None else rows
    parts = [
        BatchedDataDict(x=[0] * count, metadata={"m": value})
        for value, count in zip(values, rows, strict=True)
    ]
    return BatchedDataDict.concat(parts, metadata=rules).metadata["m"]


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        ("list", [1, 4]),
        ("sum", 5),
        ("mean", 3.25),
        ("min", 1),
        ("max", 4),
        ("first", 1),
        ({"m": "sum"}, 5),
        (max, 4),
    ],
)
def test_rules(rule, wanted):
    assert joined([1, 4], rule, rows=[1, 3]) == wanted


def test_a_rule_for_each_key_of_a_mapping():
    shards = [
        {"loss": 1.0, "tokens": 10, "steps": [1], "lr": 0.1},
        {"loss": 4.0, "tokens": 30, "steps": [2, 3], "lr": 0.1, "late": 1},
    ]
    rules = {"m": {"loss": "mean", "tokens": "sum", "steps": "concat"}}
    whole = joined(shards, rules, rows=[1, 3])
    assert whole == {"loss": 3.25, "tokens": 40, "steps": [1, 2, 3], "lr": 0.1, "late": 1}
    assert joined([{"a": 1, "b": {"c": 2}}, {"a": 3, "b": {"c": 5}}], "sum") == {"a": 4, "b": {"c": 7}}


def test_a_mean_counts_rows_and_no_empty_shard():
    assert joined([math.nan, 2.0], "mean", rows=[0, 2]) == 2.0
    assert joined([1.0, 2.0], "mean", rows=[0, 0]) == 1.5
    assert math.isnan(joined([1.0, math.nan], "min"))
    assert math.isnan(joined([math.nan, 1.0], "max"))


def test_without_rows_all_batches_count_alike():
    assert join_metadata([{"m": 1.0}, {"m": 4.0}, {"other": 9.0}], {"m": "mean"}) == {"m": 2.5, "other": 9.0}


def test_tensors_and_arrays():
    tensors = [torch.tensor([1, 2], dtype=torch.int8), torch.tensor([3, 5], dtype=torch.int8)]
    assert same(joined(tensors, "mean"), torch.tensor([2.0, 3.5], dtype=torch.float64))
    assert same(
        joined([t.bfloat16() for t in tensors], "mean", rows=[1, 3]), torch.tensor([2.5, 4.25]).bfloat16()
    )
    assert joined(tensors, "max").tolist() == [3, 5]
    assert joined([np.array([1, 2]), np.array([3, 0])], "min").tolist() == [1, 0]
    assert joined([np.array([1.0]), np.array([2.0])], "mean", rows=[1, 3]).tolist() == [1.75]


@pytest.mark.parametrize(
    ("values", "rule", "match"),
    [
        ([1, "a"], "sum", "metadata 'm' can't be joined by 'sum': .*they are int, str"),
        ([1, None], "mean", "they are NoneType, int"),
        ([1, 2], "concat", "have to be lists"),
        ([1j, 2], "max", "that have an order"),
        ([torch.ones(1), torch.ones(2)], "sum", "of one class, dtype and shape"),
        ([np.ma.masked_array([1], [True])] * 2, "sum", "have to be numbers"),
        ([{"a": 1}, {"a": "x"}], "sum", "metadata 'm', 'a' can't be joined"),
        ([{"a": 1}, 2], {"m": {"a": "sum"}}, "metadata 'm' has rules for its keys, and is a int"),
        ([{"a": 1}, {"a": 2}], {"m": {}}, "metadata 'm', 'a' differs between batches: 1 and 2"),
    ],
)
def test_what_a_rule_is_not_for(values, rule, match):
    with pytest.raises(BatchSchemaError, match=match):
        joined(values, rule)


@pytest.mark.parametrize("rules", ["median", {"m": "median"}, {"m": {"a": "median"}}, 3])
def test_unknown_rules(rules):
    with pytest.raises(ValueError, match=r"metadata is joined by 'same'.*not by"):
        joined([1, 2], rules)
    with pytest.raises(ValueError, match="metadata 'm' names 'b'"):
        joined([{"a": 1}, {"a": 2}], {"m": {"b": "sum"}})


def test_a_class_may_have_rules_of_its_own():
    class Rollouts(BatchedDataDict):
        metadata_rules: ClassVar = {"metrics": {"loss": "mean"}, "other": "sum"}

    whole = Rollouts(x=[1, 2, 3], metadata={"step": 1})
    parts = whole.shard(2)
    for part, loss in zip(parts, (1.0, 4.0), strict=True):
        part.metadata["metrics"] = {"loss": loss}
    assert Rollouts.concat(parts).metadata == {"step": 1, "metrics": {"loss": 2.0}}
    assert Rollouts.from_batches(parts, metadata="first").metadata["metrics"] == {"loss": 1.0}
    assert parts[0].union({"y": [1, 2]}).metadata["metrics"] == {"loss": 1.0}


@given(st.lists(st.lists(st.integers(-(10**6), 10**6), min_size=1, max_size=5), min_size=1, max_size=4))
def test_metrics_of_shards_are_those_of_the_whole(values):
    rows = [len(part) for part in values]
    every = [value for part in values for value in part]
    assert joined([sum(part) for part in values], "sum", rows) == sum(every)
    assert joined([max(part) for part in values], "max", rows) == max(every)
    mean = joined([sum(part) / len(part) for part in values], "mean", rows)
    assert math.isclose(mean, sum(every) / len(every), abs_tol=1e-6)


@pytest.mark.hostile
def test_small_integers_do_not_overflow():
    assert joined([np.int8(100), np.int8(100)], "sum") == 200
    assert joined([np.uint8(200), np.uint8(100)], "mean", rows=[1, 3]) == 125
    assert joined([np.array([100], np.int8)] * 2, "sum").tolist() == [200]
    assert joined([torch.tensor(100, dtype=torch.int8)] * 2, "sum") == 200


class Vague:
    def __init__(self, answer):
        self.answer = answer

    def __eq__(self, _):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    __hash__ = None


@pytest.mark.hostile
@pytest.mark.parametrize(
    "answer", [np.array([True, False]), torch.tensor([True, False]), TypeError("no"), KeyError("no")]
)
def test_what_cannot_be_compared_is_named_and_any_other_rule_takes_it(answer):
    values = [Vague(answer), Vague(answer)]
    with pytest.raises(
        BatchSchemaError, match=r"metadata 'm' can't be compared .* a Vague .*'first'"
    ) as caught:
        joined(values, "same")
    assert caught.value.key == "m"
    assert joined(values, "first") is values[0]
    assert [id(value) for value in joined(values, "list")] == [id(value) for value in values]


@pytest.mark.hostile
def test_one_object_for_all_needs_no_comparison():
    value = Vague(np.array([True, False]))
    assert joined([value, value], "same") is value


@pytest.mark.hostile
@pytest.mark.parametrize(("rule", "dtype"), [("max", torch.uint16), ("sum", torch.float8_e4m3fn)])
def test_what_torch_has_not_for_a_dtype_is_told_with_its_key(rule, dtype):
    parts = [{"metrics": {"seen": torch.ones(2).to(dtype)}}] * 2
    with pytest.raises(BatchSchemaError, match="metadata 'metrics', 'seen' can't be joined by") as caught:
        join_metadata(parts, rule)
    assert caught.value.key == "metrics.seen"
