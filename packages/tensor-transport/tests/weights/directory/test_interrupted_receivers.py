"""Receivers that are broken off: nobody waits for what they would have read."""

import asyncio
import os
import threading

import pytest
import torch
from models import Model
from pressing import press_everywhere

from raycrew.tensor_transport import DeltaSource, DeltaTarget
from raycrew.tensor_transport.errors import WeightUpdateError
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


class Returning:
    """A receiver whose weights are all of the number of the version, and that can be told to break."""

    def __init__(self, store, rollback):
        self.model = {name: torch.zeros(8) for name in "ab"}
        self.source, self.target = DeltaSource(), DeltaTarget(self.model)
        self.publisher = WeightPublisher(store, keep=9)
        self.is_told, self.is_early, self.breaks = "deltas" in rollback, "before" in rollback, False
        how = {"deltas": self.target} if self.is_told else {"rollback": rollback}
        self.receiver = WeightReceiver(self.load, store=store, **how)

    def load(self, tensors):
        if self.breaks and self.is_early:
            next(tensors)
            self.broken()
        if self.is_told:
            self.target.load(self.breaking(tensors))
            return
        for name, tensor in self.breaking(tensors):
            self.model[name].copy_(tensor)

    def breaking(self, tensors):
        for pair in tensors:
            yield pair
            if self.breaks:
                self.broken()

    def broken(self):
        self.breaks = False
        raise RuntimeError("out of memory")

    def publish(self, value, names=("b", "a")):
        tensors = {name: torch.full((8,), float(value)) for name in names}
        if not self.is_told:
            return self.publisher.publish(tensors, partial=len(names) == 1)
        update = self.publisher.publish(self.source.encode(tensors).tensors)
        self.source.commit()
        return update

    def breaks_at(self, update):
        self.breaks = True
        with pytest.raises(WeightUpdateError):
            self.receiver.apply(update)


@pytest.mark.hostile
@pytest.mark.parametrize("rollback", ["shadow", "refetch", "deltas", "before deltas"])
def test_who_was_broken_off_returns_to_the_version_that_it_says_or_to_none(store, rollback):
    ends, returning = set(), None

    def before():
        nonlocal returning, second
        returning = Returning(store, rollback)
        returning.receiver.apply(returning.publish(1))
        second = returning.publish(2)

    second = None
    for nth in press_everywhere(lambda: returning.receiver.apply(second), ["_receiving", "deltas"], before):
        returning.breaks_at(returning.publish(3))
        held = returning.receiver.version
        ends.add((held, returning.receiver.intact))
        if returning.receiver.intact:
            values = {name: tensor.tolist() for name, tensor in returning.model.items()}
            assert values == dict.fromkeys("ab", [float(held)] * 8), f"broken off at {nth}"
        returning.publisher.close()
    assert {(1, True), (2, True)} <= ends


@pytest.mark.hostile
@pytest.mark.parametrize("rollback", ["shadow", "refetch"])
def test_who_was_broken_off_returns_to_no_part_of_an_earlier_version(store, rollback):
    returning = second = None
    returned = 0

    def before():
        nonlocal returning, second
        returning = Returning(store, rollback)
        returning.receiver.apply(returning.publish(1))
        second = returning.publish(2, "a")

    for nth in press_everywhere(lambda: returning.receiver.apply(second), ["_receiving", "deltas"], before):
        later = [returning.publish(3, "b"), returning.publish(4, "a")]
        if returning.receiver.version == 2 and returning.receiver.intact:
            returning.receiver.apply(later[0])
            returning.breaks_at(later[1])
            returned += returning.receiver.intact
            if returning.receiver.intact:
                assert returning.model["a"].tolist() == [2.0] * 8, f"broken off at {nth}"
        returning.publisher.close()
    assert returned
