"""Who fetches buckets: a thread beside the one that loads, or nobody where they are at hand."""

import threading
import uuid

import pytest
import torch

from raycrew.tensor_transport import WeightDirectory, WeightPublisher, WeightReceiver
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
