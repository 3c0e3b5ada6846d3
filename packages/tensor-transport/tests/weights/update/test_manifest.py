"""What an update says of itself: where each tensor lies, what tells it from others, what it is made of."""

import dataclasses
import pickle

import pytest
import torch

from raycrew.tensor_transport import ManifestMismatchError, WeightUpdateError
from raycrew.tensor_transport.weights._update.manifest import (
    Bucket,
    BucketPlan,
    TensorEntry,
    WeightUpdate,
    check_digest,
    compare_schemas,
    join_updates,
    schema_of,
    sealed,
)
from raycrew.tensor_transport.weights._update.spans import Span

WHOLE = TensorEntry("a", "int16", (2, 1), 0, 2, 4)
PIECE = TensorEntry("b", "uint8", (3,), 1, 0, 3, (1,), (5,))
PLAN = BucketPlan((WHOLE, PIECE), (6, 3))


def part_of(part, parts=2, **more):
    entry = TensorEntry(f"w{part}", "uint8", (part + 1,), part, 0, part + 1)
    buckets = tuple(Bucket(f"{part}/{i}", i + 1, 0) for i in range(part + 1))
    made = WeightUpdate(f"publisher {part}", 7, (entry,), buckets, part=part, parts=parts)
    return sealed(dataclasses.replace(made, **more))


def test_a_tensor_is_a_view_of_its_bytes():
    bucket = torch.arange(6, dtype=torch.uint8)
    assert WHOLE.view(bucket).tolist() == [[0x0302], [0x0504]]
    WHOLE.view(bucket).zero_()
    assert bucket.tolist() == [0, 1, 0, 0, 0, 0]
    assert dataclasses.replace(WHOLE, shape=(0, 3), offset=6, size_bytes=0).view(bucket).shape == (0, 3)


def test_a_plan_knows_its_tensors_by_name_and_by_bucket():
    assert PLAN.schema == {"a": ("int16", (2, 1)), "b": ("uint8", (5,))}
    assert PLAN.by_bucket == ((WHOLE,), (PIECE,)) and BucketPlan((PIECE,), (0, 3)).by_bucket == ((), (PIECE,))
    assert (WHOLE.is_piece, PIECE.is_piece) == (False, True)


@pytest.mark.parametrize("entry", [WHOLE, PIECE])
def test_whatever_differs_between_two_plans_is_in_their_digests(entry):
    others = {
        "name": "c", "dtype": "int8", "shape": (1, 2), "bucket": 2, "offset": 7, "size_bytes": 8,
        "start": (0,), "whole": (6,),
    }  # fmt: skip
    names = [name for name in others if entry.is_piece or name not in ("start", "whole")]
    changed = [dataclasses.replace(entry, **{name: others[name]}) for name in names]
    digests = [BucketPlan((each,), (6, 3)).digest for each in (entry, *changed)]
    digests += [BucketPlan((entry,), (6, 4)).digest, BucketPlan((entry, entry), (6, 3)).digest]
    assert len(set(digests)) == len(digests)
    assert pickle.loads(pickle.dumps(PLAN)) == PLAN
    assert pickle.loads(pickle.dumps(PLAN)).digest == BucketPlan((WHOLE, PIECE), (6, 3)).digest


@pytest.mark.parametrize("name", ["", "a.b", 'quo"te\\', "Gewicht \u00e4\u1e9e\U0001f9ea", "\ud800"])
def test_a_plan_arrives_as_it_was_sent(name):
    entries = (
        TensorEntry(name, "uint8", (), 0, 0, 1),
        TensorEntry("empty", "int8", torch.Size([0, 3]), 0, 2**40, 0),
        TensorEntry("piece", "int64", (1,), 1, 0, 8, (0,), (2,)),
    )
    for plan in (BucketPlan(entries, (2**41, 8)), BucketPlan((), ()), BucketPlan((), (3,))):
        sent = pickle.loads(pickle.dumps(plan))
        assert sent == plan and sent.digest == plan.digest and sent.by_bucket == plan.by_bucket
        assert all(type(entry.shape) is tuple for entry in sent.tensors)


def test_a_plan_that_was_changed_on_its_way_has_another_digest():
    sent = pickle.dumps(PLAN)
    changed = sent.replace(b"int16", b"int32")
    assert changed != sent and pickle.loads(changed).digest != PLAN.digest


def test_small_values_are_pickled_as_their_fields():
    for value in (WHOLE, PIECE, Bucket(("a", 1), 3, None)):
        sent = pickle.loads(pickle.dumps(value))
        assert sent == value and type(sent) is type(value)


@pytest.mark.parametrize(
    "change",
    [
        {"publisher": "other"}, {"version": 8}, {"part": 1}, {"parts": 3}, {"bases": frozenset({6})},
        {"bases": frozenset()}, {"tensors": ()}, {"buckets": (Bucket("0/0", 9, 0),)},
    ],
)  # fmt: skip
def test_an_update_that_is_not_what_was_published_is_refused(change):
    update = part_of(0)
    check_digest(update)
    check_digest(dataclasses.replace(update, gather_s=5.0, buckets=(Bucket("moved", 1, 3),)))
    with pytest.raises(ManifestMismatchError, match=r"update [78] is not what its publisher made"):
        check_digest(dataclasses.replace(update, **change))


def test_parts_make_one_update_whatever_their_order():
    spans = [Span("put", 0.0, 1.0), Span("gather", 1.0, 2.0)]
    left = part_of(0, bases=frozenset({4, 5}), gather_s=3.0, put_s=1.0, spans=(spans[0],))
    right = part_of(1, bases=frozenset({5, 6}), gather_s=2.0, put_s=4.0, spans=(spans[1],))
    joined = join_updates([right, left])
    check_digest(joined)
    assert joined == join_updates([left, right])
    assert (joined.version, joined.part, joined.parts, joined.bases) == (7, 0, 1, frozenset({5}))
    assert (joined.gather_s, joined.put_s, joined.spans) == (3.0, 4.0, tuple(spans))
    assert [bucket.ticket for bucket in joined.buckets] == ["0/0", "1/0", "1/1"] and joined.size_bytes == 4
    assert [(entry.name, entry.bucket) for entry in joined.tensors] == [("w0", 0), ("w1", 2)]
    assert joined.publisher not in (left.publisher, right.publisher)
    assert joined.publisher != join_updates([left, part_of(1, publisher="other")]).publisher
    assert join_updates([part_of(0), part_of(1)]).bases is None
    assert join_updates([part_of(0), right]).bases == {5, 6}, "one part that is whole can be added to any"
    alone = part_of(0, parts=1)
    assert join_updates([alone]) is alone


@pytest.mark.parametrize(
    ("updates", "match"),
    [
        ([part_of(0), part_of(1, version=8)], r"of several versions: \[\(0, 7\), \(1, 8\)\]"),
        ([part_of(1)], r"parts \[1\] are not all of 2"),
        ([part_of(0)], r"parts \[0\] are not all of 2"),
        ([], r"of several versions: \[\]"),
        ([part_of(1), part_of(1)], r"parts \[1, 1\] are not all of 2"),
        ([part_of(0), part_of(0)], r"parts \[0, 0\] are not all of 2"),
        ([part_of(0), part_of(1), part_of(1)], r"parts \[0, 1, 1\] are not all of 2"),
        ([part_of(0), part_of(1, parts=3)], r"parts \[0, 1\] are not all of 2"),
    ],
)
def test_what_is_no_whole_version_is_refused(updates, match):
    with pytest.raises(WeightUpdateError, match=match):
        join_updates(updates)


def test_each_difference_between_what_is_offered_and_what_is_there_is_told():
    there = schema_of({name: torch.empty(2, device="meta") for name in ("a", "b", "c")})
    assert there["a"] == ("float32", (2,))
    compare_schemas(there, dict(there), 7)
    compare_schemas(there, {"a": there["a"]}, 7, partial=True)
    offered = {"b": ("float32", (3,)), "c": ("int8", (2,)), "d": there["a"]}
    for partial in (False, True):
        with pytest.raises(ManifestMismatchError, match="update 7 does not fit") as caught:
            compare_schemas(there, offered, 7, partial=partial)
        error = caught.value
        assert (error.missing, error.unexpected, error.version) == ([] if partial else ["a"], ["d"], 7)
        assert [line.split(":")[0] for line in error.mismatched] == ["b", "c"]
        assert "b: receiver has float32[2], update has float32[3]" in str(error)
        assert ("missing: a" in str(error)) is not partial
    with pytest.raises(ManifestMismatchError, match=r"missing: a$"):
        compare_schemas(there, {name: there[name] for name in "bc"}, 7)


@pytest.mark.parametrize(
    ("count", "told"), [(5, "w3, w4$"), (6, "w3, w4, and 1 more$"), (9, "w4, and 4 more$")]
)
def test_of_many_names_a_few_are_told_and_the_rest_is_counted(count, told):
    with pytest.raises(ManifestMismatchError, match=told) as caught:
        compare_schemas({f"w{i}": ("int8", (1,)) for i in range(count)}, {}, 7)
    assert len(caught.value.missing) == count


@pytest.mark.parametrize("entry", [("float32", (1,)), ("float32", (3,)), ("bfloat16", (2,)), ("int8", (2,))])
def test_another_shape_or_dtype_is_told_whichever_it_is(entry):
    with pytest.raises(ManifestMismatchError, match="different: a: receiver has") as caught:
        compare_schemas({"a": ("float32", (2,))}, {"a": entry}, 7)
    assert len(caught.value.mismatched) == 1 and not caught.value.missing and not caught.value.unexpected


def test_an_update_is_whole_and_took_no_time_unless_it_says_so():
    update = WeightUpdate("me", 1, (), ())
    assert (update.part, update.parts, update.gather_s, update.put_s) == (0, 1, 0.0, 0.0)
    assert join_updates([update]) is update
