"""Buckets between a store and `load`: how many there are at a time, and where."""

import weakref

import pytest
import torch
from models import Model, assert_same

from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher, WeightReceiver
from raycrew.tensor_transport.weights._publishing import packing

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


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("form", [dict, lambda layers: iter(layers.items())])
def test_a_publisher_packs_into_two_buckets_at_most_from_version_to_version(monkeypatch, form, directed):
    made, fresh = [], packing.fresh_bucket

    def noted(size_bytes, device):
        made.append(size_bytes)
        return fresh(size_bytes, device)

    monkeypatch.setattr(packing, "fresh_bucket", noted)
    store, directory = InProcessByteStore(), WeightDirectory.local() if directed else None
    publisher = WeightPublisher(store, bucket_bytes=256, directory=directory)
    for _ in range(3):
        model, update = Model(), publisher.publish(form(LAYERS))
        assert len(update.buckets) == 20
        WeightReceiver(model.load, store=store).apply(update)
        assert_same(model.tensors, LAYERS)
    assert made == [256] * len(made) and len(made) <= 2
