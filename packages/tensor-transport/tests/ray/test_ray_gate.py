"""A control service of Ray that stands still holds nothing up for long."""

import contextlib
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from raycrew.tensor_transport import (
    NodeMemoryBackend,
    ObjectStoreBackend,
    RayRefBackend,
    ShardRead,
    ShardRegistry,
    TransportClosedError,
    TransportTimeoutError,
)
from raycrew.tensor_transport._ray import gate
from raycrew.tensor_transport.errors import DirectoryLostError
from raycrew.tensor_transport.weights import WeightDirectory

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.hostile

_DEADLINE_S = 30.0  # Less than what Ray's nodes bear without their control service.


@contextlib.contextmanager
def stopped(cluster):
    """The control service of a cluster stands still for a while."""
    (server,) = cluster.head_node.all_processes["gcs_server"]
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


@pytest.fixture
def lender(ray_cluster, monkeypatch):
    """Questions are given up early."""
    monkeypatch.setattr(gate, "_ANSWER_S", 0.5)
    backend = NodeMemoryBackend(arena_bytes=8 << 20)
    yield backend
    backend.close()


@pytest.fixture
def connection(monkeypatch):
    """A connection that is there as long as its name is in the list; no Ray behind it."""
    names = ["session_x/01"]
    monkeypatch.setattr(
        "raycrew.tensor_transport._ray.session.connection_name", lambda: names[0] if names else None
    )
    return names


def test_an_answer_and_an_error_are_those_of_the_question(connection):
    assert gate.ask(lambda: 3) == 3
    assert gate.ask(lambda: threading.current_thread().daemon), "a question that hangs would keep a process"
    with pytest.raises(ZeroDivisionError):
        gate.ask(lambda: 1 / 0)
    with pytest.raises(TimeoutError, match="its own"):
        gate.ask(lambda: (_ for _ in ()).throw(TimeoutError("its own")))
    until_answered()


def test_who_is_interrupted_while_a_question_begins_leaves_nothing(connection, monkeypatch):
    monkeypatch.setattr(gate._room, "here", room := threading.BoundedSemaphore(1))
    begin, undone = threading.Thread.start, []

    def begin_and_be_interrupted(thread):
        begin(thread)
        thread.join(60)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Thread, "start", begin_and_be_interrupted)
        gate.ask(lambda: "made", undo=undone.append)
    assert undone == ["made"]
    assert [room.acquire(blocking=False) for _ in range(2)] == [True, False]


def test_what_is_made_too_late_is_undone(connection):
    go, undone = threading.Event(), threading.Event()
    with pytest.raises(TransportTimeoutError, match=r"did not answer within 0\.05 s"):
        gate.ask(lambda: go.wait(60), timeout_s=0.05, undo=lambda made: made and undone.set())
    go.set()
    assert undone.wait(60)
    until_answered()


def test_what_ended_with_its_connection_is_not_undone(connection):
    go, undone = threading.Event(), []
    with pytest.raises(TransportTimeoutError):
        gate.ask(lambda: go.wait(60), timeout_s=0.05, undo=undone.append)
    connection[0] = "session_y/01"
    go.set()
    until_answered()
    assert not undone


def test_a_question_whose_connection_ends_meanwhile_says_so(connection):
    def ended():
        connection.clear()
        raise AttributeError("there is no client")

    with pytest.raises(TransportClosedError, match="session_x/01, has ended; this process is not connected"):
        gate.ask(ended)
    with pytest.raises(TransportClosedError, match="not connected to Ray"):
        gate.ask(lambda: 3)
    until_answered()


def test_so_many_questions_wait_and_no_more(connection, monkeypatch):
    monkeypatch.setattr(gate._room, "here", threading.BoundedSemaphore(1))
    go = threading.Event()
    with pytest.raises(TransportTimeoutError, match="did not answer"):
        gate.ask(lambda: go.wait(60), timeout_s=0.05)
    with pytest.raises(TransportTimeoutError, match="was not asked"):
        gate.ask(lambda: 3, timeout_s=0.05)
    go.set()
    until_answered()
    assert gate.ask(lambda: 3) == 3


def until_answered():
    deadline = time.monotonic() + 60
    while questions := [thread for thread in threading.enumerate() if thread.name == "raycrew-answer"]:
        assert time.monotonic() < deadline, questions
        questions[0].join(1.0)


def test_a_stopped_control_service_holds_up_no_put(ray_cluster, lender):
    source = torch.arange(1 << 16)
    with ThreadPoolExecutor(3) as pool, stopped(ray_cluster):
        puts = [pool.submit(lender.put, [source + i]) for i in range(3)]
        shards = [put.result(_DEADLINE_S)[0] for put in puts]
        assert pool.submit(lender.stats).result(_DEADLINE_S).leases == 0
    assert {shard.scheme for shard in shards} == {"ray"}, "readers may be anywhere, as far as is known"
    until_answered()
    found = RayRefBackend().fetch([ShardRead(shard) for shard in shards], timeout_s=60)
    assert all(torch.equal(tensor, source + i) for i, tensor in enumerate(found))


def test_what_is_known_of_the_cluster_holds_while_nobody_answers(ray_cluster, lender, monkeypatch):
    assert lender.put([torch.ones(5)])[0].scheme == "node_memory"
    clock = time.monotonic
    monkeypatch.setattr("raycrew.tensor_transport.backends._machines.time.monotonic", lambda: clock() + 60)
    with ThreadPoolExecutor(1) as pool, stopped(ray_cluster):
        (shard,) = pool.submit(lender.put, [torch.ones(7)]).result(_DEADLINE_S)
    assert shard.scheme == "node_memory"
    until_answered()
    assert torch.equal(lender.fetch([ShardRead(shard)])[0], torch.ones(7))


def test_questions_are_given_up_and_what_comes_of_them_late_is_taken_back(ray_cluster, lender):
    directory = WeightDirectory.start()
    with ThreadPoolExecutor(1) as pool, stopped(ray_cluster):
        for use in (
            ObjectStoreBackend.start,
            lambda: WeightDirectory.start(name="late"),
            lambda: WeightDirectory.find("late"),
        ):
            with pytest.raises(TransportTimeoutError, match="control service did not answer"):
                pool.submit(use).result(_DEADLINE_S)
        pool.submit(directory.close).result(_DEADLINE_S)
    until_answered()
    with pytest.raises(DirectoryLostError, match="no actor named 'late'"):
        WeightDirectory.find("late")
    with pytest.raises(DirectoryLostError, match="does not answer"):
        directory.status()


def test_a_registry_puts_and_fetches_as_ever_afterwards(ray_cluster, lender):
    registry, source = ShardRegistry(lender, RayRefBackend()), torch.arange(1 << 16)
    assert torch.equal(registry.fetch(registry.put([source]), timeout_s=60)[0], source)


def test_who_is_interrupted_before_a_question_begins_takes_no_place(connection, monkeypatch):
    monkeypatch.setattr(gate._room, "here", room := threading.BoundedSemaphore(1))

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    for what in (gate, "Future"), (threading, "Thread"):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(*what, interrupted)
            gate.ask(lambda: 7)
    assert [room.acquire(blocking=False) for _ in range(2)] == [True, False]
