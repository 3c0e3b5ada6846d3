"""A directory of this machine is asked over its socket, and through Ray for what only that can hand on."""

import os
import signal
import threading
import time

import pytest
import torch

from raycrew.tensor_transport import _ray
from raycrew.tensor_transport._ray import nodes
from raycrew.tensor_transport.errors import DirectoryLostError
from raycrew.tensor_transport.transports import SharedMemoryTransport
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher, WeightReceiver
from raycrew.tensor_transport.weights._directory import actor
from raycrew.tensor_transport.weights._directory.record import Record

ray = pytest.importorskip("ray")

TIMEOUT_S = 60.0
WEIGHTS = {"w": torch.arange(4.0), "b": torch.ones(3, dtype=torch.bfloat16)}


@pytest.fixture
def directory(ray_cluster):
    with WeightDirectory.start() as directory:
        yield directory


@pytest.fixture
def calls(monkeypatch):
    """Names of methods of actors that are called."""
    found, call_actor = [], _ray.call_actor

    def note(session, method, *rest):
        found.append(method._method_name)
        return call_actor(session, method, *rest)

    monkeypatch.setattr(_ray, "call_actor", note)
    return found


def pulled(directory, store=None):
    loaded = {}

    def load(tensors):
        loaded.update((name, tensor.clone()) for name, tensor in tensors)

    with WeightReceiver(load, store=store, directory=directory) as receiver:
        receiver.pull(timeout_s=TIMEOUT_S)
    return loaded


def assert_same(found):
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in WEIGHTS.items())


def test_a_directory_of_this_machine_is_asked_through_ray_for_its_address_alone(directory, calls):
    store = SharedMemoryTransport()
    with store, WeightPublisher(store, directory=directory) as publisher:
        publisher.publish(WEIGHTS)
        assert_same(pulled(directory, store))
    assert calls == ["address"]


def test_what_lies_in_rays_store_is_named_through_ray(directory, calls):
    with WeightPublisher(directory=directory) as publisher:
        publisher.publish(WEIGHTS)
        assert calls.count("poll") == 1
        assert_same(pulled(directory))


def test_an_answer_with_references_is_had_by_who_asked_over_a_socket(directory, calls):
    with WeightPublisher(directory=directory) as publisher:
        publisher.publish(WEIGHTS)
        late = WeightDirectory(type(directory._edge)(directory._edge._actor))
        assert late.latest == 1
        assert calls[-1] == "address"
        assert_same(pulled(late))
        assert calls.count("parked") == 1


def test_who_tells_a_directory_that_stands_still_waits_for_no_answer_and_it_reads_that_later(
    directory, monkeypatch
):
    monkeypatch.setattr(actor, "ANSWER_S", 3600.0)
    pid = directory._edge._call("address", (), TIMEOUT_S).pid
    with SharedMemoryTransport() as store, WeightPublisher(store, directory=directory) as publisher:
        publisher.publish(WEIGHTS)
        for receiver in ("first", "second"):
            directory.ask(Record.hold, receiver, 1)
        os.kill(pid, signal.SIGSTOP)
        try:
            directory.tell(Record.vote, 1, "first", False, "it returned to what it had")
        finally:
            os.kill(pid, signal.SIGCONT)
        until = time.monotonic() + TIMEOUT_S
        while [status.holders for status in directory.status()] != [("second",)]:
            assert time.monotonic() < until


def test_what_fails_in_a_ticket_of_somebodys_own_store_is_no_loss_of_the_directory(directory):
    class Ticket:
        def __init__(self, path):
            self.path = path

        def __setstate__(self, state):
            if os.getpid() != state["pid"]:
                raise FileNotFoundError(state["path"])

        def __getstate__(self):
            return {"path": self.path, "pid": os.getpid()}

    with pytest.raises(FileNotFoundError, match="no such memory"):
        directory.ask(Record.hold, "receiver", Ticket("no such memory"))
    assert directory.latest is None


@pytest.mark.hostile
def test_no_publisher_waits_for_who_was_interrupted_while_it_asked_through_ray(ray_cluster, monkeypatch):
    asked = []

    def press(ref, *_):
        asked.append(ref)
        raise KeyboardInterrupt

    with WeightDirectory.start(lease_s=3600.0) as directory, SharedMemoryTransport() as store:
        edge = type(directory._edge)(directory._edge._actor)
        edge._is_found = True
        with monkeypatch.context() as pressing, pytest.raises(KeyboardInterrupt):
            pressing.setattr(nodes, "get_small", press)
            WeightDirectory(edge).wait(Record.offer, TIMEOUT_S, 1, frozenset(), "receiver", "", "node")
        with pytest.raises(ray.exceptions.TaskCancelledError):
            ray.get(asked, timeout=TIMEOUT_S)
        with WeightPublisher(store, directory=directory, bucket_bytes=256, timeout_s=1.0) as publisher:
            for version in range(1, 4):
                assert publisher.publish({name: torch.ones(64) for name in "abc"}).version == version


def test_who_waits_for_a_directory_that_is_killed_is_told(directory):
    raised, asked = [], threading.Event()

    def wait():
        asked.set()
        with pytest.raises(DirectoryLostError) as error:
            directory.wait(Record.offer, TIMEOUT_S, 7)
        raised.append(error)

    directory.ask(Record.newest)
    thread = threading.Thread(target=wait)
    thread.start()
    asked.wait(TIMEOUT_S)
    ray.kill(directory._edge._actor)
    thread.join(TIMEOUT_S / 2)
    assert raised
    with pytest.raises(DirectoryLostError):
        directory.ask(Record.newest)
