"""Weights of which something is made ready as they come: `apply` then calls that in place of `load`."""

import threading
from functools import partial

import pytest
import torch
from doubles import Generator, await_no_fetching, fetching, readies, same_bits
from models import Model, assert_same, weights
from streaming import TIMEOUT_S, Trainer, sync

from raycrew.tensor_transport import DeltaSource, DeltaTarget
from raycrew.tensor_transport.errors import BaseVersionError, ManifestMismatchError
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.testing._transports import samples
from raycrew.tensor_transport.transports import SharedMemoryTransport
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher

PREPARED = {"prepare": "prepare_weights"}


@pytest.fixture
def store():
    return InProcessByteStore()


@pytest.fixture
def directory():
    with WeightDirectory.local() as directory:
        yield directory
    await_no_fetching()


@pytest.fixture
def trainer(store, directory):
    return Trainer(store, directory)


@pytest.mark.parametrize("rollback", ["none", "shadow", "refetch"])
@pytest.mark.parametrize("verify_first", [False, True])
def test_what_it_returned_is_called_in_place_of_load(store, directory, trainer, rollback, verify_first):
    generator = Generator(store, directory, rollback=rollback, verify_first=verify_first)
    for trainer.seed in range(3):
        report = sync([trainer], [generator], directory, **PREPARED)
        assert_same(generator.model.tensors, weights(trainer.seed))
        assert generator.receiver.intact and generator.receiver.version == trainer.seed + 1
    assert generator.did == ["ahead", "exchange"] * 3
    assert {"ahead", "load", "wire"} <= {span.phase for span in report.spans}


def test_without_prepare_it_is_not_called(store, directory, trainer):
    generator = Generator(store, directory)
    sync([trainer], [generator], directory)
    trainer.publish_weights()
    generator.receiver.pull()
    assert generator.did == ["load", "load"]


def none(tensors):
    assert [name for name, _ in tensors]


def unasked(tensors):
    return dict


def one(tensors):
    next(tensors)
    return dict


def closed(tensors):
    next(tensors)
    tensors.close()
    return dict


def held_by_another(tensors):
    def some():
        yield from tensors  # Forgotten half-way, it closes what it takes from.

    next(some())
    return dict


@pytest.mark.parametrize("ahead", [none, unasked, one, closed, held_by_another])
@pytest.mark.parametrize("publish", ["publish_weights", "publish_mapping"])
@pytest.mark.parametrize("streams", [True, False])
def test_none_or_tensors_that_it_left_have_load_called(store, directory, trainer, ahead, publish, streams):
    generator = Generator(store, directory, ahead=ahead)
    for trainer.seed in range(2):
        if streams:
            sync([trainer], [generator], directory, publish=publish, **PREPARED)
        else:
            version = getattr(trainer, publish)().version
            assert generator.receiver.prepare(version).size_bytes > 1500, "all of it is fetched"
            generator.receiver.apply(version)
        assert_same(generator.model.tensors, weights(trainer.seed))
    assert generator.did == ["load"] * 2


def test_who_takes_the_last_tensor_and_asks_for_no_more_took_all(store, directory, trainer):
    def ahead(tensors):
        made = dict(next(tensors) for _ in weights())
        return partial(generator.exchanged, made)

    generator = Generator(store, directory, ahead=ahead)
    sync([trainer], [generator], directory, **PREPARED)
    assert generator.did == ["exchange"]


@pytest.mark.parametrize("borrow", [True, False])
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("streams", [True, False])
def test_tensors_of_every_kind_are_those_of_load_bit_for_bit(directory, borrow, verify, streams):
    state = {**samples(), **weights(), "large": torch.arange(1 << 16)}
    with SharedMemoryTransport(arena_bytes=1 << 20) as store, SharedMemoryTransport() as there:
        publisher = WeightPublisher(store, directory=directory, bucket_bytes=4096, timeout_s=TIMEOUT_S)
        publisher.publish(iter(state.items()) if streams else state)
        generator = Generator(there, directory, borrow=borrow, verify=verify)
        generator.receiver.prepare(1)
        generator.receiver.apply(1)
        assert generator.did == ["ahead", "exchange"]
        generator.model, ahead = Model(), generator.model
        late = Generator(there, directory, borrow=borrow, verify=verify)
        late.receiver.pull()
        assert ahead.tensors.keys() == late.model.tensors.keys() == state.keys()
        for name, tensor in late.model.tensors.items():
            assert same_bits(ahead.tensors[name], tensor), name
        publisher.close()


@pytest.mark.parametrize("publish", ["publish_weights", "publish_mapping"])
def test_several_parts(store, directory, publish):
    trainers = [Trainer(store, directory, part, 3) for part in range(3)]
    generators = [Generator(store, directory, rollback="shadow") for _ in range(2)]
    for seed in range(2):
        for trainer in trainers:
            trainer.seed = seed
        sync(trainers, generators, directory, publish=publish, **PREPARED)
        for generator in generators:
            assert_same(generator.model.tensors, weights(seed))
            assert generator.did == ["ahead", "exchange"] * (seed + 1)


def test_pieces_are_put_together_for_both():
    """Two ranks have a half each of one tensor, in buckets of their own."""
    from raycrew.tensor_transport.weights._receiving.fetching import Fetched, Heading, Parcel
    from raycrew.tensor_transport.weights._receiving.loading import Loading, load_ahead, load_whole
    from raycrew.tensor_transport.weights._update import Bucket, Stopwatch, TensorEntry

    whole = torch.arange(12, dtype=torch.uint8).reshape(4, 3)
    entries = [TensorEntry("w", "uint8", (2, 3), 0, 0, 6, (start, 0), (4, 3)) for start in (0, 2)]
    fetched = [
        Fetched(Parcel(i, "2", Bucket(i, 6, None), [entry]), whole[2 * i : 2 * i + 2].reshape(-1).clone())
        for i, entry in enumerate(entries)
    ]
    heading, made = Heading(1, "me", None, None, None), {}

    def ahead(tensors):
        made.update(tensors)
        return made.clear

    loading = Loading(heading, None, keep=True)
    assert load_ahead(ahead, loading, (one for one in fetched), Stopwatch()) == made.clear
    assert torch.equal(made["w"], whole) and loading.fetched == fetched
    complete = heading.with_all(fetched)
    assert complete.schema == {"w": ("uint8", (4, 3))} and complete.with_all([]) is complete
    load_whole(made.update, Loading(complete, None, keep=False), fetched, Stopwatch())
    assert torch.equal(made["w"], whole)


def test_all_buckets_are_fetched_while_it_stands_still(directory):
    """Also those that are only mapped: what is not, may be gone."""
    asked = [threading.Event() for _ in range(5)]

    class Watched(SharedMemoryTransport):
        def map(self, offer, *, timeout_s=None):
            next(event for event in asked if not event.is_set()).set()
            return super().map(offer, timeout_s=timeout_s)

    with SharedMemoryTransport("both") as store, Watched("both") as there:
        publisher = WeightPublisher(store, directory=directory, bucket_bytes=256, timeout_s=TIMEOUT_S)
        generator = Generator(there, directory, borrow=True, verify=False)
        for version in (1, 2):
            for event in asked:
                event.clear()
            generator.after = lambda n: [event.wait(TIMEOUT_S) for event in asked]
            publisher.publish({f"w{i}": torch.full((64,), float(i + version)) for i in range(5)})
            generator.receiver.prepare(version)
            assert all(event.is_set() for event in asked)
            generator.receiver.apply(version)
        assert generator.did == ["ahead", "exchange"] * 2
        publisher.close()


def test_what_is_at_hand_at_once_takes_no_thread(store, directory):
    publisher = WeightPublisher(store, directory=directory, timeout_s=TIMEOUT_S)
    generator = Generator(store, directory)
    generator.after = lambda n: threads.extend(fetching())
    threads = []
    publisher.publish(weights())
    generator.receiver.prepare(1)
    assert generator.did == ["ahead"] and not threads, "it is one bucket"


def test_a_partial_version_is_made_ready_by_who_has_what_it_is_added_to(store, directory):
    publisher = WeightPublisher(store, directory=directory, bucket_bytes=512, timeout_s=TIMEOUT_S, keep=2)
    generator = Generator(store, directory, rollback="shadow")
    publisher.publish(weights())
    generator.receiver.prepare(1)
    with pytest.raises(BaseVersionError):
        generator.receiver.prepare(publisher.publish({"scale": weights(1)["scale"]}, partial=True).version)
    assert generator.did == ["ahead"], "it holds none"
    generator.receiver.pull()
    publisher.publish({"scale": weights(2)["scale"]}, partial=True)
    generator.receiver.prepare(3)
    assert generator.given.keys() == {"scale"}
    generator.receiver.apply(3)
    assert generator.did == ["ahead", "load", "load", "ahead", "exchange"]
    assert_same(generator.model.tensors, weights() | {"scale": weights(2)["scale"]})


class Partial(Trainer):
    """Publishes only what is said, if anything."""

    some = ()

    def publish_weights(self):
        state = self.mine()
        some = {name: state[name] for name in self.some}
        return self.publisher.publish(some or state, partial=bool(some))


def test_who_is_behind_catches_up_by_load_and_is_not_made_ready(store):
    with WeightDirectory.local(keep=8) as directory:
        trainer = Partial(store, directory)
        generators = [Generator(store, directory, rollback="shadow") for _ in range(2)]
        sync([trainer], generators, directory, **PREPARED)
        trainer.some, trainer.seed = ("scale",), 1
        sync([trainer], generators[:1], directory, **PREPARED)
        trainer.some, trainer.seed = ("layer.0.weight",), 2
        for generator in generators:
            del generator.did[:]
        sync([trainer], generators, directory, **PREPARED)
        assert generators[0].did == ["ahead", "exchange"] and generators[1].did == ["load", "load"]
        expected = weights() | {"scale": weights(1)["scale"], "layer.0.weight": weights(2)["layer.0.weight"]}
        for generator in generators:
            assert_same(generator.model.tensors, expected)
            assert generator.receiver.version == 3
        del generators[1].did[:]
        sync([trainer], generators, directory, **PREPARED)
        assert generators[1].did == ["ahead", "exchange"]


def test_deltas_are_unpacked_by_what_their_target_makes_of_them(store, directory):
    """Whoever makes ready what a target loads leaves the loading to the target, which knows the way back."""
    source, state = DeltaSource(), weights()
    held = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    target, given = DeltaTarget(held), []

    def ahead(tensors):
        told = [(key, tensor.clone()) for key, tensor in tensors]
        given.append(len(told))
        return lambda tensors: (list(tensors), target.load(told))

    publisher = WeightPublisher(store, directory=directory, bucket_bytes=512, timeout_s=TIMEOUT_S)
    receiver = readies(target.load, ahead, store, directory, deltas=target)
    for seed in range(3):
        told = source.encode(weights(seed))
        number = publisher.publish(told.tensors, partial=told.partial).version
        receiver.prepare(number)
        receiver.apply(number)
        source.commit()
        assert_same(held, weights(seed))
    assert given == [len(state)] * 3
    told = source.encode(weights(3))
    number = publisher.publish(told.tensors, partial=told.partial).version
    receiver.prepare(number)
    target._apply, apply = lambda name, delta: 1 / 0 if name == "mask" else apply(name, delta), target._apply
    with pytest.raises(Exception, match="division by zero"):
        receiver.apply(number)
    assert receiver.intact and receiver.version == 3
    assert_same(held, weights(2))


def test_tied_names_are_compared_before_anything_is_made_ready_of_them(store, directory, trainer):
    tensor = torch.zeros(8, 16)
    tied = weights() | {"layer.0.weight": tensor, "layer.3.weight": tensor}
    generator = Generator(store, directory, expected=tied)
    for publish in (trainer.publish_weights, trainer.publish_mapping):
        with pytest.raises(ManifestMismatchError, match="are one tensor here"):
            generator.receiver.prepare(publish().version)
        assert "exchange" not in generator.did and generator.receiver.intact
    assert generator.given == {}, "all of the second was looked at first"
    same = weights() | {"layer.3.weight": weights()["layer.0.weight"]}
    trainer.publisher.publish(same)
    generator.receiver.prepare(3)
    generator.receiver.apply(3)
    assert_same(generator.model.tensors, same)


@pytest.mark.hostile
def test_what_does_not_fit_is_refused_before_it_is_asked_for(store, directory, trainer):
    generator = Generator(store, directory, expected={"another": torch.zeros(3)})
    for publish in (trainer.publish_weights, trainer.publish_mapping):
        with pytest.raises(ManifestMismatchError):
            generator.receiver.prepare(publish().version)
    assert generator.given == {} and generator.receiver.intact


def test_another_version_than_was_prepared_is_loaded(store, directory, trainer):
    generator = Generator(store, directory)
    for number in (1, 2):
        trainer.publish_weights()
        generator.receiver.prepare(number)
        if number == 1:
            generator.receiver.prepare(1)
            generator.receiver.apply(1)
    assert generator.did == ["ahead", "ahead", "exchange", "ahead"]
    trainer.seed = 1
    trainer.publish_weights()
    generator.receiver.pull()
    assert generator.did[-1] == "load" and generator.receiver.version == 3
    assert_same(generator.model.tensors, weights(1))
    assert generator.receiver.apply(3).size_bytes == 0
    assert generator.did[-1] == "load" and generator.receiver.intact


def test_what_is_held_already_is_not_exchanged(store, directory, trainer):
    generator = Generator(store, directory)
    trainer.publish_weights()
    generator.receiver.pull()
    generator.receiver.prepare(1)
    assert generator.receiver.apply(1).size_bytes == 0
    assert generator.did == ["load", "ahead"]
