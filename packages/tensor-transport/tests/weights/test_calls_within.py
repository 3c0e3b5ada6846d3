"""What a `load`, or an iterator of weights, asks of the receiver or publisher that is calling it."""

import threading

import pytest
import torch
from models import Model, assert_same, weights

from raycrew.tensor_transport.errors import TransportError, WeightUpdateError
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher, WeightReceiver

pytestmark = pytest.mark.hostile

CALLS = {
    "apply": lambda receiver: receiver.apply(1),
    "prepare": lambda receiver: receiver.prepare(1),
    "pull": lambda receiver: receiver.pull(),
    "close": lambda receiver: receiver.close(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_load_that_calls_its_receiver_is_told_so(name):
    store, directory, model = InProcessByteStore(), WeightDirectory.local(), Model()
    WeightPublisher(store, directory=directory).publish(weights())
    wanted, raised = [CALLS[name]], []

    def load(tensors):
        if wanted:
            wanted.pop()(receiver)
        model.load(tensors)

    def update():
        try:
            receiver.apply(1)
        except WeightUpdateError as error:
            raised.append(error)

    receiver = WeightReceiver(load, store=store, directory=directory)
    thread = threading.Thread(target=update, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for itself"
    assert "called by the load() or ahead() that it is within" in str(raised[0])
    assert receiver.apply(1).version == 1
    assert_same(model.tensors, weights())
    receiver.close()


def test_an_iterator_that_closes_its_publisher_is_told_so_and_nothing_is_left():
    store = InProcessByteStore()
    publisher = WeightPublisher(store)

    def closing():
        yield "first", torch.ones(4)
        publisher.close()
        yield "second", torch.ones(4)

    with pytest.raises(TransportError, match="called by the iterator that it takes its weights from"):
        publisher.publish(closing())
    assert publisher.publish(weights()).version == 1
    publisher.close()
    assert publisher.latest is None and not store.held
