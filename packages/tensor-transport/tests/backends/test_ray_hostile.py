"""Backends over Ray in forked children, and among very many references."""

import multiprocessing
import os
import signal

import pytest
import torch

from raycrew.tensor_transport import (
    NodeMemoryBackend,
    RayRefBackend,
    RTensor,
    ShardError,
    ShardRegistry,
    _ray,
)
from raycrew.tensor_transport._ray import objects

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.hostile


def in_fork(work):
    """What `work()` gives in a forked child, as text, which ends right after it."""
    ours, theirs = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            theirs.send(work())
        except BaseException as error:  # noqa: BLE001 - it is shown in the parent
            theirs.send(f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)
    theirs.close()
    found = ours.recv() if ours.poll(60) else "the child does not answer"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return found


@pytest.fixture
def lender(ray_cluster):
    backend = NodeMemoryBackend(arena_bytes=8 << 20)
    yield backend
    backend.close()


def read(backend, shard):
    return ShardRegistry(backend).fetch([RTensor(shard)], timeout_s=60)[0]


def test_a_forked_child_reads_lent_memory_and_is_told_that_it_cannot_put(lender):
    source = torch.arange(1 << 20)
    (shard,) = lender.put([source])
    assert in_fork(lambda: int(read(lender, shard).sum())) == int(source.sum())
    answer = in_fork(lambda: lender.put([source + 1]) and "it put")
    assert answer.startswith("TransportError") and "was forked from" in answer
    (later,) = lender.put([source + 2])
    assert torch.equal(read(lender, shard), source) and torch.equal(read(lender, later), source + 2)


def test_ray_is_refused_by_name_in_a_forked_child(stores):
    refs = RayRefBackend()
    (mine,), (theirs,) = refs.put([torch.ones(3)]), stores.put([torch.ones(3)])
    for work in (
        lambda: refs.put([torch.ones(3)]),
        lambda: read(refs, mine),
        lambda: stores.put([torch.ones(3)]),
        lambda: read(stores, theirs),
        lambda: stores.release([theirs]),
        stores.stats,
    ):
        answer = in_fork(lambda work=work: repr(work()))
        assert answer.startswith("TransportError") and f"was forked from {os.getpid()}" in answer, answer
    assert torch.equal(read(stores, theirs), torch.ones(3))


def until_empty(backend):
    for _ in range(6000):
        if not backend.stats().shards:
            return
        _GATE.wait(0.01)
    raise AssertionError(backend.stats())


_GATE = multiprocessing.get_context("spawn").Event()


class Noting:
    """Something whose methods that were called are noted."""

    def __init__(self, real, asked):
        self.real, self.asked = real, asked

    def __getattr__(self, name):
        method = getattr(self.real, name)

        def noted(*arguments):
            self.asked.append(name)
            return method(*arguments)

        return noted


def test_a_put_beside_many_references_asks_for_no_count_of_them(lender, monkeypatch):
    asked, others = [], [ray.ObjectRef.from_random() for _ in range(20_000)]
    real = objects.core_worker
    if not hasattr(real(), "add_object_out_of_scope_callback"):
        pytest.skip("this Ray can only be asked for the counts of all its references")
    monkeypatch.setattr(objects, "core_worker", lambda: Noting(real(), asked))
    for i in range(50):
        (shard,) = lender.put([torch.full((1 << 10,), i)])
        assert int(read(lender, shard)[0]) == i
    assert "add_object_out_of_scope_callback" in asked, "each put asks Ray something"
    assert "get_all_reference_counts" not in asked
    assert len(_ray.references_held()) >= len(others) and "get_all_reference_counts" in asked
    del shard
    until_empty(lender)


def test_where_ray_has_to_be_asked_it_is_asked_seldom(lender, monkeypatch):
    asked, clock = [], [0.0]

    def count():
        asked.append(1)
        clock[0] += 1.0
        return held()

    held = _ray.references_held
    monkeypatch.setattr(_ray, "when_unreferenced", lambda ref, tell: False)
    monkeypatch.setattr(_ray, "references_held", count)
    monkeypatch.setattr("raycrew.tensor_transport.backends.node_memory.time.monotonic", lambda: clock[0])
    shards = [lender.put([torch.full((1 << 10,), i)]) for i in range(50)]
    assert len(asked) == 1
    assert [int(read(lender, shard)[0]) for (shard,) in shards] == list(range(50))
    shards.clear()
    clock[0] += 30.0
    lender.collect()
    assert len(asked) == 2 and lender.stats().shards <= 1


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/1/fd/../../2/fd/3", "/proc/1/mem", "/proc/x/fd/3"])
def test_a_handle_names_no_file_elsewhere(lender, path):
    (shard,) = lender.put([torch.ones(5)])
    token, machine, _, place = shard.locator
    object.__setattr__(shard, "locator", (token, machine, path, place))
    with pytest.raises(ShardError, match=r"is no memory of a process|is lost"):
        read(lender, shard)
