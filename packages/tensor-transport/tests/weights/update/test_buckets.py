"""Buckets between a store and `load`: how many there are at a time, and where."""

import weakref

import pytest
import torch
from models import Model, assert_same

from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightPublisher, WeightReceiver

LAYERS = {f"layer.{i}": torch.full((64,), float(i)) for i in range(20)}


class Counted(InProcessByteStore):
    """Gives memory of its own, and knows what is still held of it."""

    gives_own_memory = True

    def __init__(self):
        super().__init__()
        self.given = []

    def get(self, ticket, timeout_s=None):
        data = super().get(ticket, timeout_s).copy()
        self.given.append(weakref.ref(data))
        return data

    @property
    def alive(self):
        return sum(each() is not None for each in self.given)


@pytest.mark.parametrize("rollback", ["none", "shadow"])
def test_a_receiver_holds_no_more_than_it_loads_and_fetches_unless_for_a_shadow(rollback):
    store, model, seen = Counted(), Model(), []

    def load(tensors):
        for name, tensor in tensors:
            model.load([(name, tensor)])
            seen.append(store.alive)

    update = WeightPublisher(store, bucket_bytes=256).publish(LAYERS)
    receiver = WeightReceiver(load, store=store, rollback=rollback)
    receiver.apply(update)
    assert_same(model.tensors, LAYERS)
    assert len(store.given) == 20
    if rollback == "shadow":
        assert store.alive == 20 and receiver.intact
    else:
        assert max(seen) <= 3, "the one being loaded, the next one, and that of the tensor before"
