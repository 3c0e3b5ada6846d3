import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Model, assert_same, weights

from raycrew.tensor_transport.errors import (
    BucketFetchError,
    ChecksumMismatchError,
    ManifestMismatchError,
    StaleVersionError,
    TransportClosedError,
    UnsupportedTensorError,
    WeightUpdateError,
)
from raycrew.tensor_transport.protocols import ByteStore, PeerGroup
from raycrew.tensor_transport.testing import InProcessByteStore, LocalPeers
from raycrew.tensor_transport.testing._transports import bits_of, samples
from raycrew.tensor_transport.weights import WeightPublisher, WeightReceiver, digest_weights
from raycrew.tensor_transport.weights._update.spans import Span, Stopwatch


@pytest.fixture
def store():
    return InProcessByteStore()


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def pair(store, model):
    return WeightPublisher(store, bucket_bytes=1024), WeightReceiver(model.load, store=store)


@pytest.mark.smoke
def test_update_arrives_exactly(pair, model):
    publisher, receiver = pair
    receipt = receiver.apply(publisher.publish(weights()))
    assert (receipt.version, receipt.previous_version, receiver.version) == (1, None, 1)
    assert receipt.size_bytes >= 4 * 8 * 16 * 4
    assert_same(model.tensors, weights())


@pytest.mark.parametrize("borrow", [False, True])
@pytest.mark.parametrize("verify_first", [False, True])
def test_modes_load_the_same(store, model, borrow, verify_first):
    publisher = WeightPublisher(store, bucket_bytes=512)
    receiver = WeightReceiver(model.load, store=store, borrow=borrow, verify_first=verify_first)
    receiver.apply(publisher.publish(weights()))
    assert_same(model.tensors, weights())


def test_kept_tensors_keep_their_values(store):
    kept = {}
    publisher = WeightPublisher(store, bucket_bytes=256)
    receiver = WeightReceiver(kept.update, store=store)
    receiver.apply(publisher.publish(weights(0)))
    first = dict(kept)
    receiver.apply(publisher.publish(weights(1)))
    assert_same(first, weights(0))
    assert_same(kept, weights(1))


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), max_size=3),
            st.sampled_from(
                [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64]
            ),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(64, 700),
)
def test_any_state_dict_arrives_exactly(specs, bucket_bytes):
    state = {
        str(i): torch.randint(0, 2, shape).to(dtype) if shape else torch.ones((), dtype=dtype)
        for i, (shape, dtype) in enumerate(specs)
    }
    store, model = InProcessByteStore(), Model()
    update = WeightPublisher(store, bucket_bytes=bucket_bytes).publish(state)
    WeightReceiver(model.load, store=store).apply(update)
    assert_same(model.tensors, state)
    assert all(b.size_bytes <= max(bucket_bytes, 125 * 8) for b in update.buckets)


@pytest.mark.parametrize("form", [dict, lambda state: iter(state.items())])
@pytest.mark.parametrize("bucket_bytes", [4096, 1 << 20])
def test_tensors_of_every_dtype_and_layout_arrive_bit_by_bit(store, form, bucket_bytes):
    state, kept = samples(), {}
    update = WeightPublisher(store, bucket_bytes=bucket_bytes).publish(form(state))
    WeightReceiver(kept.update, store=store).apply(update)
    assert kept.keys() == state.keys() >= {"bfloat16", "float8_e4m3fn", "float4_e2m1fn_x2", "tied", "empty"}
    for name, tensor in state.items():
        assert (kept[name].dtype, kept[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits_of(kept[name]), bits_of(tensor)), name
    assert digest_weights(kept) == digest_weights(state)


def test_an_iterator_may_reuse_its_buffer(pair, model):
    publisher, receiver = pair
    staging = torch.empty(16)

    def gathered():
        for i in range(3):
            yield f"w{i}", staging.fill_(i)

    receiver.apply(publisher.publish(gathered()))
    assert [model.tensors[f"w{i}"][0].item() for i in range(3)] == [0, 1, 2]


def test_tied_tensors_are_sent_once(store, model):
    embedding = torch.randn(64, 32)
    state = {"embed": embedding, "head": embedding, "transposed": embedding.T}
    update = WeightPublisher(store).publish(state)
    assert update.size_bytes == 2 * embedding.numel() * 4
    WeightReceiver(model.load, store=store).apply(update)
    assert_same(model.tensors, state)


def test_non_contiguous_tensors(pair, model):
    base = torch.arange(48, dtype=torch.float32).reshape(6, 8)
    state = {"t": base.T, "strided": base[::2, 1::3], "expanded": base[0].expand(4, 8), "parameter": base}
    state["parameter"] = torch.nn.Parameter(base.clone())
    publisher, receiver = pair
    receiver.apply(publisher.publish(state))
    assert_same(model.tensors, {k: v.detach() for k, v in state.items()})


def test_a_tensor_larger_than_a_bucket(store, model):
    state = {"small": torch.ones(3), "large": torch.randn(1000), "after": torch.zeros(5)}
    update = WeightPublisher(store, bucket_bytes=128).publish(state)
    WeightReceiver(model.load, store=store).apply(update)
    assert_same(model.tensors, state)


def test_update_is_small_and_picklable(store, model):
    update = WeightPublisher(store).publish({f"layer.{i}": torch.zeros(1000) for i in range(100)})
    pickled = pickle.dumps(update)
    assert len(pickled) < 20_000
    WeightReceiver(model.load, store=store).apply(pickle.loads(pickled))
    assert len(model.tensors) == 100


def test_previous_version_is_released_when_the_next_is_complete(store):
    publisher = WeightPublisher(store, bucket_bytes=256)
    first = publisher.publish(weights(0))
    second = publisher.publish(weights(1))
    assert publisher.latest is second
    assert set(store.held) == {bucket.ticket for bucket in second.buckets}
    assert first.version == 1 and second.version == 2
    publisher.close()
    publisher.close()
    assert not store.held
    with pytest.raises(TransportClosedError):
        publisher.publish(weights())


@pytest.mark.hostile
def test_failed_publication_keeps_the_latest_and_leaks_nothing(store):
    publisher = WeightPublisher(store, bucket_bytes=64)
    update = publisher.publish(weights(0))
    held = set(store.held)

    def breaks():
        yield "a", torch.ones(100)
        yield "b", torch.ones(100)
        raise RuntimeError("gather failed")

    with pytest.raises(RuntimeError, match="gather failed"):
        publisher.publish(breaks())
    assert publisher.latest is update
    assert set(store.held) == held
    assert publisher.publish(weights(1)).version == 2


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        ({}, ValueError, "no tensor"),
        ([("a", torch.ones(1)), ("a", torch.ones(1))], ValueError, "'a' comes twice"),
        ({"a": 3}, UnsupportedTensorError, "'a' is a int"),
        ({"a": torch.ones(2, device="meta")}, UnsupportedTensorError, "'a' is a meta"),
        ({"a": torch.ones(2, 2).to_sparse()}, UnsupportedTensorError, "'a' is a sparse_coo"),
    ],
)
def test_bad_weights(pair, bad, error, match):
    with pytest.raises(error, match=match):
        pair[0].publish(bad)


def test_versions_rise(pair):
    publisher, _ = pair
    assert publisher.publish(weights(), version=7).version == 7
    with pytest.raises(ValueError, match="above the last one, 7, got 7"):
        publisher.publish(weights(), version=7)
    assert publisher.publish(weights()).version == 8


def test_bucket_bytes_are_checked():
    with pytest.raises(ValueError, match="at least 64, got 3"):
        WeightPublisher(InProcessByteStore(), bucket_bytes=3)


def test_manifest_is_compared_before_a_byte_moves(store, model):
    expected = weights()
    expected["ids"] = torch.empty(8, dtype=torch.int64, device="meta")
    expected["other"] = torch.ones(1)
    del expected["mask"]
    receiver = WeightReceiver(model.load, expected=expected, store=store)
    with pytest.raises(ManifestMismatchError) as caught:
        receiver.apply(WeightPublisher(store).publish(weights()))
    assert caught.value.missing == ["other"]
    assert caught.value.unexpected == ["mask"]
    assert caught.value.mismatched == ["ids: receiver has int64[8], update has int64[7]"]
    assert "missing: other" in str(caught.value) and "unexpected: mask" in str(caught.value)
    assert store.reads == 0 and not model.tensors
    assert receiver.version is None and receiver.intact


def test_first_update_sets_what_is_expected(pair):
    publisher, receiver = pair
    receiver.apply(publisher.publish(weights()))
    changed = weights() | {"scale": torch.tensor(1.0)}
    with pytest.raises(
        ManifestMismatchError, match=r"scale: receiver has bfloat16\[\], update has float32\[\]"
    ):
        receiver.apply(publisher.publish(changed))
    assert receiver.version == 1


def test_errors_survive_pickling(store, model):
    receiver = WeightReceiver(model.load, expected={"x": torch.ones(2)}, store=store)
    with pytest.raises(ManifestMismatchError) as caught:
        receiver.apply(WeightPublisher(store).publish(weights()))
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.missing == ["x"] and again.version == 1 and str(again) == str(caught.value)


@pytest.mark.hostile
def test_damage_before_loading_leaves_the_weights_alone(pair, store, model):
    publisher, receiver = pair
    receiver.apply(publisher.publish(weights(0)))
    update = publisher.publish(weights(1))
    store.damage(update.buckets[0].ticket, 17)
    with pytest.raises(ChecksumMismatchError, match="bucket 0 arrived damaged") as caught:
        receiver.apply(update)
    assert caught.value.bucket == 0
    assert (caught.value.version, caught.value.current_version, caught.value.intact) == (2, 1, True)
    assert "still holds and reports version 1" in caught.value.__notes__[0]
    assert receiver.version == 1 and receiver.intact
    assert_same(model.tensors, weights(0))


@pytest.mark.hostile
def test_damage_while_loading_is_reported_as_a_mixture_and_repaired(pair, store, model):
    publisher, receiver = pair
    receiver.apply(publisher.publish(weights(0)))
    update = publisher.publish(weights(1))
    last = update.buckets[-1].ticket
    store.damage(last)
    with pytest.raises(ChecksumMismatchError) as caught:
        receiver.apply(update)
    assert not caught.value.intact and not receiver.intact
    assert receiver.version == 1
    assert "a mixture" in caught.value.__notes__[0]
    store.damage(last)
    assert receiver.apply(update).version == 2
    assert receiver.intact
    assert_same(model.tensors, weights(1))


def test_verify_first_never_leaves_a_mixture(store, model):
    publisher = WeightPublisher(store, bucket_bytes=256)
    receiver = WeightReceiver(model.load, store=store, verify_first=True)
    receiver.apply(publisher.publish(weights(0)))
    update = publisher.publish(weights(1))
    store.damage(update.buckets[-1].ticket)
    with pytest.raises(ChecksumMismatchError):
        receiver.apply(update)
    assert receiver.intact
    assert_same(model.tensors, weights(0))


def test_a_released_update_cannot_be_fetched(pair, store):
    publisher, receiver = pair
    old = publisher.publish(weights(0))
    publisher.publish(weights(1))
    with pytest.raises(BucketFetchError, match="bucket 0 of"):
        receiver.apply(old)
    assert receiver.version is None


@pytest.mark.hostile
def test_truncated_bucket(pair, store):
    publisher, receiver = pair
    update = publisher.publish(weights())
    ticket = update.buckets[0].ticket
    store.held[ticket] = store.held[ticket][:-8]
    with pytest.raises(ChecksumMismatchError, match="bytes in place of"):
        receiver.apply(update)


def test_an_error_inside_load_is_named_and_not_committed(store):
    def load(tensors):
        next(iter(tensors))
        raise RuntimeError("no room")

    receiver = WeightReceiver(load, store=store)
    with pytest.raises(WeightUpdateError, match=r"load\(\) raised RuntimeError\('no room'\)") as caught:
        receiver.apply(WeightPublisher(store, bucket_bytes=64).publish(weights()))
    assert receiver.version is None and not caught.value.intact


def test_a_fetch_error_shows_through_a_load_that_wraps_it(store):
    def load(tensors):
        try:
            dict(tensors)
        except Exception as error:
            raise RuntimeError("engine failed") from error

    publisher = WeightPublisher(store, bucket_bytes=64)
    update = publisher.publish(weights())
    store.release(update.buckets[1].ticket)
    with pytest.raises(BucketFetchError, match="bucket 1"):
        WeightReceiver(load, store=store).apply(update)


def test_load_has_to_take_every_tensor(store):
    receiver = WeightReceiver(lambda tensors: next(iter(tensors)), store=store)
    with pytest.raises(WeightUpdateError, match="took 1 of 8 tensors"):
        receiver.apply(WeightPublisher(store).publish(weights()))
    assert receiver.version is None


@pytest.mark.hostile
def test_stale_same_and_late(store, model):
    publisher = WeightPublisher(store)
    receiver = WeightReceiver(model.load, store=store)
    old = publisher.publish(weights(0))
    new = publisher.publish(weights(1))
    receiver.apply(new)
    reads = store.reads
    assert receiver.apply(new).size_bytes == 0
    assert store.reads == reads
    with pytest.raises(StaleVersionError, match="update 1 is stale: version 2 is held"):
        receiver.apply(old)
    late = Model()
    assert WeightReceiver(late.load, store=store).apply(publisher.latest).version == 2
    assert_same(late.tensors, weights(1))


@pytest.mark.hostile
def test_a_restarted_trainer_may_go_back_but_its_predecessor_may_not(store, model):
    receiver = WeightReceiver(model.load, store=store)
    before = WeightPublisher(store)
    receiver.apply(before.publish(weights(0), version=50))
    after = WeightPublisher(store)
    receiver.apply(after.publish(weights(1), version=40))
    assert receiver.version == 40
    with pytest.raises(
        StaleVersionError, match=r"update 51 is stale: its publisher \w{8} was replaced by \w{8}"
    ):
        receiver.apply(before.publish(weights(2), version=51))


def test_fakes_fit_their_protocols(store):
    assert isinstance(store, ByteStore)
    assert isinstance(LocalPeers([object()]), PeerGroup)
    with pytest.raises(ValueError, match="no such ranks"):
        LocalPeers([1, 2]).on(ranks=[2])


def test_a_stopwatch_tells_each_phase_by_itself(monkeypatch):
    moments = iter([10.0, 11.0, 20.0, 22.0, 30.0, 34.0, 40.0, 48.0])
    monkeypatch.setattr("time.time", lambda: next(moments))
    watch = Stopwatch()
    for phase in ("load", "gather", "put", "load"):
        with watch.measure(phase):
            pass
    assert [watch.total(phase) for phase in ("gather", "load", "put", "wire")] == [2.0, 9.0, 4.0, 0.0]
    assert watch.spans[1] == Span("gather", 20.0, 22.0)
