"""What is published of a model and how, parts of one, and ways back."""

import dataclasses
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import Model, assert_same, weights

from raycrew.tensor_transport.errors import (
    ChecksumMismatchError,
    ManifestMismatchError,
    SourceChangedError,
    WeightUpdateError,
)
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import (
    WeightDirectory,
    WeightPublisher,
    WeightReceiver,
    digest_weights,
    gather_weights,
    join_updates,
)
from raycrew.tensor_transport.weights._update.manifest import TensorEntry
from raycrew.tensor_transport.weights._update.regions import check_cover, shard_region


@pytest.fixture
def store():
    return InProcessByteStore()


def arrived(update, store, **options):
    model = Model()
    WeightReceiver(model.load, store=store, **options).apply(update)
    return model.tensors


@pytest.mark.parametrize("form", [dict, lambda d: iter(d.items())])
def test_names_are_chosen_and_changed_and_floats_cast(store, form):
    state = weights()
    publisher = WeightPublisher(
        store,
        dtype=torch.bfloat16,
        rename={"ids": "token_ids"},
        select=lambda name: name in ("ids", "layer.0.weight", "empty"),
    )
    found = arrived(publisher.publish(form(state)), store)
    want = {
        "layer.0.weight": state["layer.0.weight"].bfloat16(),
        "token_ids": state["ids"],
        "empty": state["empty"].bfloat16(),
    }
    assert_same(found, want)
    assert [name for name, _ in gather_weights(state, select=["ids"])] == ["ids"]


@pytest.mark.hostile
@pytest.mark.parametrize("names", ["layer.0.weight", iter(["ids"]), 3])
def test_names_are_not_looked_for_in_one_text_nor_in_what_is_used_up(store, names):
    with pytest.raises(TypeError, match="select= is a predicate, or names in a list or set"):
        WeightPublisher(store, select=names)
    with pytest.raises(TypeError, match="select="):
        next(gather_weights(weights(), select=names))


@pytest.mark.hostile
@pytest.mark.parametrize("form", [dict, lambda d: iter(d.items())])
@pytest.mark.parametrize(
    ("name", "rename"), [(1, None), (None, None), (b"a", None), ("a", lambda name: None), ("a", {"a": 7})]
)
def test_a_name_that_is_no_text_is_refused(store, name, rename, form):
    publisher = WeightPublisher(store, rename=rename)
    with pytest.raises(TypeError, match="a tensor's name is a text, got"):
        publisher.publish(form({name: torch.ones(2)}))
    assert not store.held


@pytest.mark.parametrize("rename", [{"a": "b"}, {"x": "b"}, {"x": "a"}, {"b": "x"}])
@pytest.mark.parametrize("order", ["xab", "axb", "abx"])
def test_of_tied_tensors_too_no_two_are_given_one_name(store, rename, order):
    tied = torch.ones(3)
    state = {name: torch.zeros(3) if name == "x" else tied for name in order}
    with pytest.raises(ValueError, match=r"the name .* comes twice"):
        WeightPublisher(store, rename=rename).publish(state)
    assert not store.held


def test_a_tensor_is_replaced_by_its_quantised_form_and_scale(store):
    def quantise(name, tensor):
        if not name.endswith("weight"):
            return tensor
        scale = tensor.abs().max() / 127
        return [(name, (tensor / scale).round().to(torch.int8)), (f"{name}.scale", scale)]

    state = weights()
    found = arrived(WeightPublisher(store, transform=quantise).publish(state), store)
    assert found["layer.1.weight"].dtype == torch.int8
    close = found["layer.1.weight"] * found["layer.1.weight.scale"]
    assert torch.allclose(close, state["layer.1.weight"], atol=0.02)
    assert torch.equal(found["ids"], state["ids"])


@pytest.mark.hostile
def test_a_write_to_what_is_cast_is_seen(store):
    state = {f"w{i}": torch.full((64,), float(i)) for i in range(8)}
    put, count = store.put, []

    def write(data):
        count.append(1)
        if len(count) == 3:
            state["w0"].numpy()[:] = 9
        return put(data)

    store.put = write
    with pytest.raises(SourceChangedError, match="'w0'"):
        WeightPublisher(store, bucket_bytes=128, dtype=torch.bfloat16).publish(state)


def test_parts_are_joined_to_one_update(store):
    state = weights()
    names = sorted(state)
    publishers = [WeightPublisher(store, bucket_bytes=256, part=i, parts=2) for i in range(2)]
    for version in (1, 2):
        mine = [{name: state[name] for name in names[part::2]} for part in range(2)]
        parts = [p.publish(each, version=version) for p, each in zip(publishers, mine, strict=True)]
        update = join_updates(pickle.loads(pickle.dumps(parts))[::-1])
        assert update.version == version
        assert_same(arrived(update, store), state)
    with pytest.raises(WeightUpdateError, match="part 0 of 2 of version 2: join_updates"):
        arrived(parts[0], store)
    with pytest.raises(WeightUpdateError, match=r"parts \[1\] are not all of 2"):
        join_updates(parts[1:])
    with pytest.raises(WeightUpdateError, match="of several versions"):
        join_updates([parts[0], publishers[1].publish({"x": torch.ones(1)}, version=3)])


@pytest.mark.hostile
def test_an_update_that_was_changed_on_its_way_is_refused(store):
    update = WeightPublisher(store).publish({"a": torch.ones(2), "b": torch.zeros(2)})
    a, b = update.tensors
    exchanged = (dataclasses.replace(a, name="b"), dataclasses.replace(b, name="a"))
    reads = store.reads
    wrong = ({"tensors": exchanged}, {"version": 7}, {"publisher": "other"}, {"bases": frozenset({1})})
    for changed in (*wrong, {"tensors": exchanged, "digest": ""}):
        with pytest.raises(ManifestMismatchError, match="the digest of its manifest differs"):
            arrived(dataclasses.replace(update, **changed), store)
    assert store.reads == reads


def test_the_plan_of_an_unchanged_model_is_made_once(store):
    publisher = WeightPublisher(store)
    plans = [publisher.publish(weights(seed)).tensors for seed in range(2)]
    assert plans[0] is plans[1]
    assert publisher.publish(weights(layers=2)).tensors != plans[0]


@pytest.mark.parametrize("rollback", ["shadow", "refetch"])
@pytest.mark.parametrize("borrow", [False, True])
def test_a_failed_load_returns_to_the_version_before(store, rollback, borrow):
    publisher, model = WeightPublisher(store, bucket_bytes=256, keep=2), Model()
    faults = []

    def load(tensors):
        if faults:
            model.load([next(tensors), next(tensors)])
            raise faults.pop()
        model.load(tensors)

    receiver = WeightReceiver(load, store=store, rollback=rollback, borrow=borrow)
    receiver.apply(publisher.publish(weights(0)))
    receiver.apply(publisher.publish(weights(1)))
    faults.append(RuntimeError("no room"))
    with pytest.raises(WeightUpdateError, match="no room") as caught:
        receiver.apply(publisher.publish(weights(2)))
    assert caught.value.intact and receiver.intact and receiver.version == 2
    assert_same(model.tensors, weights(1))
    receiver.apply(publisher.latest)
    assert_same(model.tensors, weights(2))


@pytest.mark.hostile
def test_a_shadow_that_was_written_to_is_not_returned_to(store):
    """Though `load` must not write to what it is given."""
    publisher, model, fails = WeightPublisher(store, bucket_bytes=256), Model(), False

    def load(tensors):
        for name, tensor in tensors:
            model.load([(name, tensor)])
            if fails and name == "layer.2.weight":
                raise RuntimeError("no room")
            tensor.zero_()

    receiver = WeightReceiver(load, store=store, rollback="shadow")
    receiver.apply(publisher.publish(weights(0)))
    fails = True
    with pytest.raises(WeightUpdateError, match="no room") as caught:
        receiver.apply(publisher.publish(weights(1)))
    assert not caught.value.intact and not receiver.intact
    assert any(
        "returning to version 1 failed, too: ChecksumMismatchError" in n for n in caught.value.__notes__
    )
    fails = False
    assert receiver.apply(publisher.latest).version == 2 and receiver.intact
    assert_same(model.tensors, weights(1))


@pytest.mark.hostile
def test_a_way_back_that_fails_is_told_as_a_mixture(store):
    publisher, model = WeightPublisher(store, bucket_bytes=256, keep=1), Model()
    receiver = WeightReceiver(model.load, store=store, rollback="refetch")
    receiver.apply(publisher.publish(weights(0)))
    update = publisher.publish(weights(1))
    store.damage(update.buckets[-1].ticket)
    with pytest.raises(ChecksumMismatchError) as caught:
        receiver.apply(update)
    assert not caught.value.intact
    assert any("returning to version 1 failed, too: BucketFetchError" in n for n in caught.value.__notes__)


def test_several_versions_are_kept_on_request(store):
    publisher = WeightPublisher(store, keep=2)
    updates = [publisher.publish(weights(seed)) for seed in range(3)]
    assert set(store.held) == {b.ticket for update in updates[1:] for b in update.buckets}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"keep": 0}, "keep must be at least 1"),
        ({"window_bytes": 0}, "window_bytes must be at least 1, got 0"),
        ({"part": 2, "parts": 2}, "part must be from 0 to 1"),
        ({"sharded": True, "transform": lambda n, t: t}, "transform= takes whole tensors"),
        ({"timeout_s": math.nan}, "timeout_s must be above 0"),
        ({"dtype": torch.int8}, "dtype= casts floating-point tensors .*, not to torch.int8"),
    ],
)
def test_options_are_checked(store, options, match):
    with pytest.raises(ValueError, match=match):
        WeightPublisher(store, **options)
    with pytest.raises(ValueError, match="rollback must be one of"):
        WeightReceiver(print, store=store, rollback="maybe")


@pytest.mark.parametrize("ask", ["apply", "prepare"])
def test_a_deadline_that_never_comes_is_refused(store, ask):
    directory = WeightDirectory.local()
    WeightPublisher(store, directory=directory).publish(weights())
    receiver = WeightReceiver(print, store=store, directory=directory)
    with receiver, pytest.raises(ValueError, match="a number of seconds, not nan"):
        getattr(receiver, ask)(1, timeout_s=math.nan)


def test_without_checksums_only_sizes_are_compared(store):
    update = WeightPublisher(store, checksums=False).publish(weights())
    assert {bucket.checksum for bucket in update.buckets} == {None}
    store.damage(update.buckets[0].ticket)
    arrived(update, store)
    store.held[update.buckets[0].ticket] = store.held[update.buckets[0].ticket][:-8]
    with pytest.raises(ChecksumMismatchError, match="bytes in place of"):
        arrived(update, store, verify=False)


def test_digests_are_equal_where_weights_are():
    state = weights()
    assert digest_weights(state) == digest_weights(reversed(list(state.items())))
    changed = state | {"ids": state["ids"] + 1}
    assert digest_weights(state) != digest_weights(changed)
    assert digest_weights({"a": torch.zeros(2)}) != digest_weights({"a": torch.zeros(2, dtype=torch.int32)})


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(1, 4), st.none() | st.integers(0, 2)), min_size=1, max_size=3),
)
def test_shards_of_a_mesh_cover_a_tensor_exactly_once(whole, mesh):
    sizes = [size for size, _ in mesh]
    dims = [None if dim is None or dim >= len(whole) else dim for _, dim in mesh]
    pieces = []
    for coordinate in (
        torch.cartesian_prod(*(torch.arange(n) for n in sizes)).reshape(-1, len(sizes)).tolist()
    ):
        region = shard_region(whole, sizes, coordinate, dims)
        if region is not None:
            start, shape = region
            same = tuple(whole) == shape
            place = {} if same else {"start": start, "whole": tuple(whole)}
            pieces.append(TensorEntry("x", "uint8", shape, 0, 0, 0, **place))
    assert pieces
    check_cover(pieces, 1)


@pytest.mark.parametrize(
    ("pieces", "match"),
    [
        ([((0,), (2,)), ((3,), (1,))], "have 3 of its 4 elements"),
        ([((0,), (3,)), ((2,), (2,))], "overlap"),
    ],
)
def test_gaps_and_overlaps_are_refused(pieces, match):
    entries = [TensorEntry("x", "uint8", shape, 0, 0, 0, start, (4,)) for start, shape in pieces]
    with pytest.raises(ManifestMismatchError, match=match):
        check_cover(entries, 1)
