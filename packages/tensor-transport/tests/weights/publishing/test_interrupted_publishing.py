"""A publisher that is interrupted: what it keeps of that goes with the next version at the latest."""

import pytest
import torch
from pressing import press_everywhere

from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.transports import SharedMemoryTransport
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher
from raycrew.tensor_transport.weights._publishing import packing
from raycrew.tensor_transport.weights._update import stores

MODEL = {f"layers.{i}": torch.full((4096,), float(i)) for i in range(6)}
PLACES = ("/_bytes/shared/", "/transports/shared_memory.py", "/_update/stores.py", "/packing.py")
BUCKET = MODEL["layers.0"].nbytes


class Pressed(InProcessByteStore):
    """Somebody presses Ctrl-C while it releases something."""

    left = -1

    def release(self, ticket):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        super().release(ticket)


@pytest.mark.hostile
@pytest.mark.parametrize("nth", [1, 4, 6])
@pytest.mark.parametrize("directory", [None, WeightDirectory.local])
def test_what_an_interrupt_keeps_goes_with_the_next_version(directory, nth):
    store = Pressed()
    publisher = WeightPublisher(store, directory=directory and directory(), bucket_bytes=BUCKET)
    for _ in range(2):
        publisher.publish(MODEL)
    store.left = nth
    with pytest.raises(KeyboardInterrupt):
        publisher.publish(MODEL)
    for _ in range(2):
        publisher.publish(MODEL)
        assert len(store.held) == len(MODEL)
    publisher.close()
    assert not store.held


class Counted(SharedMemoryTransport):
    def __init__(self):
        self.held = set()
        super().__init__()

    def reserve(self, size_bytes):
        offer, room = super().reserve(size_bytes)
        self.held.add(offer.key)
        return offer, room

    def withdraw(self, offers):
        self.held -= {offer.key for offer in offers}
        super().withdraw(offers)


@pytest.mark.hostile
@pytest.mark.parametrize("where", ["reserved", "packed", "sent"])
@pytest.mark.parametrize("directory", [None, WeightDirectory.local])
def test_an_interrupt_while_a_bucket_is_made_keeps_none(directory, where, monkeypatch):
    """As it gets its memory, as it was filled, or as it was sent and the next one is begun."""
    left = 3

    def interrupted(function):
        def call(*args, **options):
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            return function(*args, **options)

        return call

    with Counted() as transport:
        publisher = WeightPublisher(transport, directory=directory and directory(), bucket_bytes=BUCKET)
        publisher.publish(MODEL)
        with monkeypatch.context() as patched:
            if where == "reserved":
                patched.setattr(stores, "_over", interrupted(stores._over))
            elif where == "packed":
                patched.setattr(packing, "copy_into", interrupted(packing.copy_into))
            else:
                patched.setattr(packing.Placer, "place", interrupted(packing.Placer.place))
            with pytest.raises(KeyboardInterrupt):
                publisher.publish(MODEL)
        assert len(transport.held) == len(MODEL)
        publisher.publish(MODEL)
        assert len(transport.held) == len(MODEL)
        publisher.close()
        assert not transport.held


@pytest.mark.hostile
@pytest.mark.parametrize("directory", [None, WeightDirectory.local])
def test_an_interrupt_at_any_moment_keeps_no_shared_memory(directory):
    with SharedMemoryTransport() as transport:
        publisher = WeightPublisher(transport, directory=directory and directory(), bucket_bytes=BUCKET)
        publisher.publish(MODEL)
        for nth in press_everywhere(lambda: publisher.publish(MODEL), PLACES):
            publisher.publish(MODEL)
            assert transport._arenas.stats().shards == len(MODEL), nth
        publisher.close()
        assert transport._arenas.stats().shards == 0
    assert nth > 50
