"""Who fetches buckets: a thread beside the one that loads, or nobody where they are at hand."""

import threading
import uuid

import pytest
import torch

from raycrew.tensor_transport import WeightDirectory, WeightPublisher, WeightReceiver
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.transports import SharedMemoryTransport

WEIGHTS = {f"w{i}": torch.full((64,), float(i)) for i in range(5)}


class Watched(SharedMemoryTransport):
    """Notes which threads map."""

    def __init__(self, session):
        super().__init__(session)
        self.threads = set()

    def map(self, offer, *, timeout_s=None):
        self.threads.add(threading.current_thread().name.split("_")[0])
        return super().map(offer, timeout_s=timeout_s)


@pytest.mark.parametrize("by_number", [False, True])
@pytest.mark.parametrize("verify", [False, True])
def test_what_is_at_hand_and_not_looked_at_is_fetched_by_no_thread(by_number, verify):
    got, session = {}, uuid.uuid4().hex
    with (
        WeightDirectory.local() as directory,
        SharedMemoryTransport(session) as store,
        Watched(session) as there,
        WeightPublisher(store, directory=directory, bucket_bytes=256) as publisher,
        WeightReceiver(
            lambda tensors: got.update({name: t.clone() for name, t in tensors}),
            store=there,
            borrow=True,
            verify=verify,
            directory=directory,
        ) as receiver,
    ):
        update = publisher.publish(WEIGHTS)
        receiver.apply(update.version if by_number else update)
        assert len(update.buckets) == 5
        assert all(torch.equal(got[name], tensor) for name, tensor in WEIGHTS.items())
        assert there.threads == ({"MainThread", "weight-fetch"} if verify else {"MainThread"})


class Fetched(InProcessByteStore):
    """Says which buckets were asked for."""

    def __init__(self):
        super().__init__()
        self.asked = [threading.Event() for _ in range(4)]
        self.count = 0

    def get(self, ticket, timeout_s=None):
        found = super().get(ticket, timeout_s)
        self.asked[self.count].set()
        self.count += 1
        return found


@pytest.mark.parametrize("directory", [None, WeightDirectory.local])
def test_the_next_bucket_is_fetched_while_one_is_loaded(directory):
    store, loaded = Fetched(), []

    def load(tensors):
        for i, (name, _) in enumerate(tensors):
            loaded.append(name)
            assert all(asked.wait(60) for asked in store.asked[: i + 2])
            assert store.count <= i + 2, "and no other one: that takes memory"

    found = directory and directory()
    publisher = WeightPublisher(store, directory=found, bucket_bytes=256)
    update = publisher.publish({f"layer.{i}": torch.full((64,), float(i)) for i in range(4)})
    assert len(update.buckets) == 4
    receiver = WeightReceiver(load, store=store, directory=found)
    receiver.apply(update if found is None else update.version)
    assert loaded == [f"layer.{i}" for i in range(4)]
