"""Receivers that come to a version by those before it, of more than one publisher or not by their numbers."""

import pytest
import torch
from models import Model, assert_same, weights
from streaming import TIMEOUT_S, Generator, sync

from raycrew.tensor_transport.errors import StaleVersionError, WeightUpdateError
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher, WeightReceiver
from raycrew.tensor_transport.weights._receiving.chain import apply_chain
from raycrew.tensor_transport.weights._receiving.held import Held

pytestmark = pytest.mark.hostile


@pytest.fixture
def store():
    return InProcessByteStore()


@pytest.fixture
def directory():
    with WeightDirectory.local(keep=9) as found:
        yield found


class Trainer:
    """Publishes what changed; its first one whole models."""

    def __init__(self, store, directory):
        self.publisher = WeightPublisher(store, directory=directory, timeout_s=TIMEOUT_S)
        self.step = 1

    def publish_weights(self):
        self.step += 1
        return self.publisher.publish(changed(self.step), partial=True)


def changed(step):
    return {"ids": torch.arange(7) + step}


def breaking(tensors):
    next(tensors)
    raise MemoryError("the worker ran out of memory")


@pytest.mark.parametrize("way", ["pull", "sync", "prepare"])
def test_who_was_handed_versions_goes_on_by_their_numbers(store, directory, way):
    """The first of the versions to come by is older than what is held."""
    trainer, generator = Trainer(store, directory), Generator(store, directory)
    generator.receiver.apply(trainer.publisher.publish(weights()))
    generator.receiver.apply(trainer.publish_weights())
    if way == "pull":
        trainer.publish_weights()
        generator.receiver.pull(timeout_s=TIMEOUT_S)
    else:
        sync([trainer], [generator], directory, prepare="prepare_weights" if way == "prepare" else None)
    assert generator.receiver.require(3) == 3
    assert_same(generator.model.tensors, weights() | changed(3))
    with pytest.raises(StaleVersionError, match="update 2 is stale: version 3 is held"):
        generator.receiver.pull(2)


def test_who_was_handed_more_than_one_catches_up_by_their_numbers(store, directory):
    trainer, generator = Trainer(store, directory), Generator(store, directory)
    generator.receiver.apply(trainer.publisher.publish(weights()))
    generator.receiver.apply(trainer.publish_weights())
    trainer.publisher.publish({"scale": torch.tensor(9.0, dtype=torch.bfloat16)}, partial=True)
    assert sync([trainer], [generator], directory).version == 4
    scaled = {"scale": torch.tensor(9.0, dtype=torch.bfloat16)}
    assert_same(generator.model.tensors, weights() | scaled | changed(3))


@pytest.mark.parametrize("way", ["pull", "sync", "prepare"])
def test_a_mixture_begins_again_with_what_a_replaced_publisher_began(store, directory, way):
    before, generator = Trainer(store, directory), Generator(store, directory)
    first = before.publisher.publish(weights())
    generator.receiver.pull()
    trainer = Trainer(store, directory)
    second = trainer.publish_weights()
    generator.receiver.pull()
    trainer.publish_weights()
    load, generator.model.load = generator.model.load, breaking
    with pytest.raises(WeightUpdateError, match="ran out of memory"):
        generator.receiver.pull()
    assert not generator.receiver.intact
    generator.model.load = load
    if way == "pull":
        generator.receiver.pull(timeout_s=TIMEOUT_S)
    else:
        sync([trainer], [generator], directory, prepare="prepare_weights" if way == "prepare" else None)
    held = 3 if way == "pull" else 4
    assert generator.receiver.require(held) == held
    assert_same(generator.model.tensors, weights() | changed(held))
    assert [generator.receiver.require(each) for each in (first, second)] == [held, held]


def test_who_returned_to_a_replaced_publisher_lacks_what_its_successor_published(store, directory):
    before, model = Trainer(store, directory), Model()
    first = before.publisher.publish(weights())
    receiver = WeightReceiver(lambda tensors: model.load(tensors), store=store, directory=directory)
    receiver.pull()
    trainer = Trainer(store, directory)
    second = trainer.publish_weights()
    receiver.pull()
    third = trainer.publish_weights()
    load, model.load = model.load, breaking
    with pytest.raises(WeightUpdateError, match="ran out of memory"):
        receiver.pull()
    model.load = load
    assert receiver.pull(1).version == receiver.require(first) == 1
    for missed in (second, third):
        with pytest.raises(
            WeightUpdateError, match=rf"version {missed.version} of publisher \w{{8}} is required"
        ):
            receiver.require(missed)
    assert receiver.pull().version == receiver.require(second) == receiver.require(third) == 3
    with pytest.raises(StaleVersionError, match=r"its publisher \w{8} was replaced"):
        receiver.pull(1)


@pytest.mark.parametrize(("held", "tried"), [(Held(5, "a"), [1, 2]), (Held(5, "a", intact=False), [1])])
def test_the_last_one_is_not_passed_over_nor_is_any_by_a_mixture(held, tried):
    seen = []

    def apply(version, left_s):
        seen.append(version)
        assert left_s is None
        raise StaleVersionError(f"version {version} is stale")

    with pytest.raises(StaleVersionError, match=f"version {tried[-1]} is stale"):
        apply_chain([1, 2], None, lambda: held, apply)
    assert seen == tried
    assert apply_chain([], None, lambda: held, apply) is None
