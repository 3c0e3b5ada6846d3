"""Receivers that are broken off: nobody waits for what they would have read."""

import asyncio
import os
import threading

import pytest
import torch
from models import Model
from pressing import press_everywhere

from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher, WeightReceiver

TIMEOUT_S = 60.0
MODEL = {f"layers.{i}": torch.full((64,), float(i)) for i in range(6)}
STOPS = [KeyboardInterrupt, asyncio.CancelledError, SystemExit, RuntimeError]


@pytest.fixture
def store():
    return InProcessByteStore()


@pytest.fixture
def directory():
    """One that waits for a silent receiver for as long as this test takes."""
    with WeightDirectory.local(lease_s=3600.0) as directory:
        yield directory


def publisher_of(store, directory):
    return WeightPublisher(store, directory=directory, bucket_bytes=256, timeout_s=1.0)


@pytest.mark.hostile
@pytest.mark.parametrize("prepares", [True, False])
@pytest.mark.parametrize("stop", STOPS)
def test_nobody_waits_for_a_receiver_that_is_broken_off(store, directory, stop, prepares):
    def stopped(*_):
        raise stop

    def load(tensors):
        next(tensors)
        raise stop

    class Stopping(InProcessByteStore):
        held = store.held
        get = stopped

    publisher = publisher_of(store, directory)
    publisher.publish(MODEL)
    receiver = WeightReceiver(load, store=Stopping() if prepares else store, directory=directory)
    with pytest.raises(BaseException) as found:
        receiver.prepare(1) if prepares else receiver.pull()
    assert found.type is stop or isinstance(found.value.__cause__, stop)
    for version in range(2, 5):
        assert publisher.publish(MODEL).version == version


@pytest.mark.hostile
@pytest.mark.parametrize("stop", STOPS)
def test_nor_for_its_thread_that_still_asks_for_more(store, directory, stop):
    """The receiver is gone while a thread of its own waits for the bucket that comes next."""
    begun, asks, broken_off = threading.Event(), threading.Event(), threading.Event()

    class Heard(WeightDirectory):
        def wait(self, method, until, /, *args):
            if threading.current_thread().name.startswith("weight-fetch"):
                asks.set()
            return super().wait(method, until, *args)

    def pairs():
        for n, pair in enumerate(MODEL.items()):
            yield pair
            if n == 1:  # One bucket was sent.
                begun.set()
                assert broken_off.wait(TIMEOUT_S)

    def load(tensors):
        next(tensors)
        assert asks.wait(TIMEOUT_S)
        raise stop

    publisher = publisher_of(store, directory)
    publishing = threading.Thread(target=lambda: publisher.publish(pairs()))
    publishing.start()
    assert begun.wait(TIMEOUT_S)
    receiver = WeightReceiver(load, store=store, directory=Heard(directory._edge))
    with pytest.raises(BaseException) as found:
        receiver.apply(1)
    assert found.type is stop or isinstance(found.value.__cause__, stop)
    broken_off.set()
    publishing.join()
    for thread in threading.enumerate():
        if thread.name.startswith("weight-fetch"):
            thread.join(TIMEOUT_S)
    for version in range(2, 5):
        assert publisher.publish(MODEL).version == version


@pytest.mark.hostile
def test_an_interrupt_at_any_moment_keeps_no_publisher_waiting(store, directory):
    publisher, model = publisher_of(store, directory), Model()
    receiver = WeightReceiver(model.load, store=store, directory=directory)
    small = dict(list(MODEL.items())[:2])
    publisher.publish(small)
    for nth in press_everywhere(receiver.pull, ("/weights/_receiving/", "/_directory/directory.py")):
        for n in range(2):
            assert publisher.publish(small).version == 2 * nth + n
    assert nth > 50


@pytest.mark.hostile
def test_a_process_that_is_forked_by_a_load_and_ends_there_gives_nothing_up(store, directory):
    publisher, model = publisher_of(store, directory), Model()
    publisher.publish(MODEL)

    def load(tensors):
        if (child := os.fork()) == 0:
            raise SystemExit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        model.load(tensors)

    receiver = WeightReceiver(load, store=store, directory=directory)
    parent = os.getpid()
    try:
        assert receiver.pull().version == 1
    finally:
        if os.getpid() != parent:
            os._exit(7)
