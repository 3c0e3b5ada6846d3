"""Who loads takes every tensor: one that closes its iterator, or hushes an interrupt, did not."""

import contextlib

import pytest
from models import Model, weights

from raycrew.tensor_transport.errors import WeightUpdateError
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher, WeightReceiver

pytestmark = pytest.mark.hostile


@pytest.fixture
def published():
    """A store, and a directory with version 1 in it, whose names came with its buckets."""
    store = InProcessByteStore()
    with (
        WeightDirectory.local() as directory,
        WeightPublisher(store, directory=directory, bucket_bytes=256) as publisher,
    ):
        publisher.publish(iter(weights().items()))
        yield store, directory


def test_a_load_that_closes_its_iterator_did_not_take_what_was_to_come(published):
    store, directory = published
    loaded = []

    def some(tensors):
        yield from tensors  # Closed, it closes what it takes from.

    def load(tensors):
        found = some(tensors)
        loaded.append(next(found))
        found.close()

    receiver = WeightReceiver(load, store=store, directory=directory)
    with pytest.raises(WeightUpdateError, match="has to exhaust its iterator"):
        receiver.pull()
    assert receiver.version is None and not receiver.intact and len(loaded) == 1


def test_an_interrupt_that_a_load_hushes_is_raised(published):
    """It came while the next bucket was waited for: those that it had were all of them, as far as it knew."""
    store, directory = published
    model = Model()

    class Pressed(InProcessByteStore):
        def get(self, ticket, timeout_s=None):
            if self.reads == 2:
                raise KeyboardInterrupt
            return super().get(ticket, timeout_s)

    def load(tensors):
        with contextlib.suppress(KeyboardInterrupt):
            model.load(tensors)

    pressed = Pressed()
    pressed.held = store.held
    receiver = WeightReceiver(load, store=pressed, directory=directory)
    with pytest.raises(KeyboardInterrupt):
        receiver.pull()
    assert receiver.version is None and not receiver.intact
