"""Buckets in the shared memory of a node: one copy for all receivers, and none left behind."""

import os
from pathlib import Path

import pytest
import torch
from models import Model, assert_same, weights

from raycrew.tensor_transport.errors import BucketFetchError
from raycrew.tensor_transport.transports import PullTransport
from raycrew.tensor_transport.transports.shared_memory import SharedMemoryTransport
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher, WeightReceiver

FOLDER = Path("/dev/shm") / f"raycrew-{os.geteuid()}"


@pytest.fixture
def transport():
    with SharedMemoryTransport(arena_bytes=1 << 20) as transport:
        yield transport


def reader():
    return SharedMemoryTransport()


def test_receivers_of_a_node_map_the_same_bucket(transport):
    assert isinstance(transport, PullTransport)
    kept = {}
    state = weights() | {"large": torch.arange(1 << 18)}
    update = WeightPublisher(transport, bucket_bytes=1 << 20).publish(state)
    for name in "ab":
        with reader() as own:
            receiver = WeightReceiver(
                lambda tensors, name=name: kept.update({name: dict(tensors)}), store=own, borrow=True
            )
            receiver.apply(update)
    assert_same(kept["a"], state)
    assert_same(kept["b"], state)


@pytest.mark.parametrize("borrow", [False, True])
def test_versions_that_nobody_needs_are_withdrawn_by_who_hears_of_it(transport, borrow):
    with WeightDirectory.local(keep=1) as directory, reader() as own:
        publisher = WeightPublisher(transport, directory=directory, bucket_bytes=1 << 20)
        model = Model()
        receiver = WeightReceiver(model.load, store=own, directory=directory, borrow=borrow)
        first = publisher.publish(weights(0))
        receiver.pull()
        for seed in range(1, 6):
            publisher.publish(weights(seed))
            receiver.pull()
        assert_same(model.tensors, weights(5))
        assert len(list(FOLDER.glob(f"*{first.buckets[0].ticket.key.spot.arena.split('-')[0]}*"))) < 8
        with pytest.raises(BucketFetchError, match="cannot be had"):
            WeightReceiver(model.load, store=own).apply(first)
        publisher.close()
        with pytest.raises(BucketFetchError):
            WeightReceiver(Model().load, store=own, directory=directory).pull()


def test_a_transport_that_does_not_map_is_pulled(transport):
    class Plain(SharedMemoryTransport):
        @property
        def capabilities(self):
            found = super().capabilities
            return type(found)(reach=found.reach, keeps_copy=True)

        def map(self, offer):
            raise AssertionError

    with Plain() as own:
        model = Model()
        WeightReceiver(model.load, store=own).apply(WeightPublisher(transport).publish(weights()))
    assert_same(model.tensors, weights())
