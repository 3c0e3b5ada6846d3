"""The backends over Ray's object store, on two simulated nodes."""

import contextlib
import dataclasses
import fcntl
import gc
import os
import pickle
import signal
import time
from pathlib import Path

import pytest
import torch
from actors import ActorPeer, wait_for_end

from raycrew.tensor_transport import (
    NodeMemoryBackend,
    ObjectStoreBackend,
    RayRefBackend,
    RTensor,
    ShardLostError,
    ShardRead,
    ShardRegistry,
    TensorArguments,
    TransportError,
    _ray,
    release,
)
from raycrew.tensor_transport.backends import node_memory
from raycrew.tensor_transport.protocols import ShardBackend
from raycrew.tensor_transport.testing import BackendCase, check_shard_backend, put_rows

ray = pytest.importorskip("ray")


def pid_of(_actor):
    return os.getpid()


@contextlib.contextmanager
def stopped(actor):
    """An actor that does not answer, for a while."""
    pid = ray.get(actor.__ray_call__.remote(pid_of), timeout=240)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("node", [pytest.param("node0", marks=pytest.mark.long), "node1"])
def test_store_actors_conform(stores, node):
    def restart():
        store = stores._stores[ray.get_runtime_context().get_node_id()]
        before = ray.get(store.resolve.remote("", []))
        ray.kill(store, no_restart=False)
        deadline = time.monotonic() + 240
        while ray.get(store.resolve.remote("", []), timeout=240) == before:
            assert time.monotonic() < deadline, "the store was not restarted"

    @contextlib.contextmanager
    def stall(_peer, shards):
        with stopped(stores._stores[shards[0].node_id]):
            yield shards

    case = BackendCase(stores, lambda: ActorPeer(stores, node), True, True, restart, stall)
    check_shard_backend(case)


@pytest.mark.slow
@pytest.mark.parametrize("node", [pytest.param("node0", marks=pytest.mark.long), "node1"])
def test_ray_references_conform(ray_cluster, node):
    @contextlib.contextmanager
    def stall(peer, shards):
        """Objects that are not there yet."""
        with stopped(peer.actor):
            late = peer.actor.run.remote(torch.ones)
            yield [dataclasses.replace(shard, locator=(late, 0)) for shard in shards]

    backend = RayRefBackend()
    case = BackendCase(backend, lambda: ActorPeer(backend, node), False, False, stall=stall)
    check_shard_backend(case)


@pytest.mark.slow
def test_node_memory_conforms(ray_cluster):
    @contextlib.contextmanager
    def stall(_peer, shards):
        """As an owner that was stopped while it was about to use the arena anew."""
        with Path(shards[0].locator[2]).open("rb") as arena:
            fcntl.flock(arena, fcntl.LOCK_EX)
            yield shards

    backend = NodeMemoryBackend()
    case = BackendCase(backend, lambda: ActorPeer(backend), False, False, stall=stall)
    check_shard_backend(case)
    backend.close()


def test_backends_fit_their_protocol():
    assert isinstance(RayRefBackend(), ShardBackend)
    assert isinstance(NodeMemoryBackend(), ShardBackend)
    assert isinstance(ObjectStoreBackend({}), ShardBackend)


def test_a_dead_store_is_named(ray_cluster):
    backend = ObjectStoreBackend.start([ray.get_runtime_context().get_node_id()])
    shards = put_rows(backend, 5)
    backend.close()
    wait_for_end(backend._stores[shards[0].node_id].stats.remote)
    with pytest.raises(ShardLostError, match="the store of node") as caught:
        backend.fetch([], timeout_s=60) or ShardRegistry(backend).fetch([RTensor(shards[0])], timeout_s=60)
    assert caught.value.node_id == shards[0].node_id
    backend.release(shards)


def test_the_lost_shard_of_several_is_named(ray_cluster, monkeypatch):
    backend = RayRefBackend()
    shards = [backend.put([torch.full((1 << 18,), value)])[0] for value in range(3)]
    get, lost = _ray.get, shards[1].locator[0]

    def get_unless_lost(refs, timeout_s=None):
        if lost in (refs if isinstance(refs, list) else [refs]):
            raise ShardLostError("an object is lost")
        return get(refs, timeout_s)

    monkeypatch.setattr(_ray, "get", get_unless_lost)
    with pytest.raises(ShardLostError, match=f"shard {shards[1].shard_id} of .* an object is lost") as caught:
        backend.fetch([ShardRead(shard) for shard in shards], timeout_s=240)
    assert (caught.value.owner, caught.value.node_id) == (shards[1].owner, shards[1].node_id)


def test_a_node_without_a_store_is_named(ray_cluster):
    with pytest.raises(TransportError, match="has no store"):
        put_rows(ObjectStoreBackend({"elsewhere": None}), 1)


def test_clear_node_and_stats_by_node(stores):
    here = ray.get_runtime_context().get_node_id()
    put_rows(stores, 1)
    assert {node: s.shards for node, s in stores.stats_by_node().items()}[here] == 2
    assert stores.clear_node(here) == 2
    assert stores.stats().held_bytes == 0


def test_more_than_the_object_store_holds_is_spilled_and_read_back(stores):
    count, rows = 40, 1 << 20
    shards = [stores.put([torch.full((rows,), i)])[0] for i in range(count)]
    assert stores.stats().held_bytes == count * rows * 8 > 2 * 150 * 2**20
    for i, shard in enumerate(shards):
        (tensor,) = stores.fetch([ShardRead(shard)], timeout_s=240)
        assert tensor[0] == tensor[-1] == i and int(tensor.sum()) == i * rows
        del tensor
    stores.release(shards)
    assert stores.stats().held_bytes == 0


def keep(_, backends):
    """Hold views of shards, and what refers to them, for the life of the process."""
    _KEPT.append([(s, backend.fetch([ShardRead(x) for x in s], timeout_s=60)) for backend, s in backends])


_KEPT = []


def held(_actor):
    return _ray.references_held()


@pytest.mark.long  # in short: a killed consumer of the conformance suite
def test_a_dead_consumer_keeps_nothing(stores):
    """What a consumer has in hand is freed when it was released and the consumer is killed."""
    store, references = stores._stores[ray.get_runtime_context().get_node_id()], RayRefBackend()
    consumer, tensors = ActorPeer(None), [torch.ones(1 << 20), torch.ones(2 << 20)]

    def held_by_store():
        return ray.get(store.__ray_call__.remote(held), timeout=240)

    before = held_by_store()
    owned, ours = stores.put(tensors), references.put(tensors)
    of_store, of_driver = held_by_store() - before, {shard.locator[0].hex() for shard in ours}
    assert len(of_store) >= 2 and len(of_driver) == 2
    consumer.call(keep, [(stores, owned), (references, ours)])
    stores.release(owned)
    del ours
    gc.collect()
    assert of_driver <= held(None), "a consumer lost what it holds"
    consumer.kill()
    deadline = time.monotonic() + 240
    while of_driver & held(None) or of_store & held_by_store():
        assert time.monotonic() < deadline, "a dead consumer's references are counted for ever"
        time.sleep(0.02)


def test_a_full_store_and_disk_are_named(ray_cluster, monkeypatch):
    def refuse(_value):
        raise ray.exceptions.OutOfDiskError("Local disk is full")

    monkeypatch.setattr(ray, "put", refuse)
    with pytest.raises(TransportError, match=r"no room .*Local disk is full.*release shards"):
        RayRefBackend().put([torch.ones(3)])


@pytest.fixture
def lender():
    backend = NodeMemoryBackend(arena_bytes=8 << 20)
    yield backend
    backend.close()


def read_later(_, backend, handles, gate):
    """Wait for a file to appear, read, write to what was read."""
    deadline = time.monotonic() + 240
    while not gate.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    (rows,) = ShardRegistry(backend).fetch(handles)
    before = int(rows.sum())
    rows += 1
    return before, int(rows.sum())


def until_empty(backend):
    deadline = time.monotonic() + 240
    while (stats := backend.stats()).shards:
        assert time.monotonic() < deadline, stats
        time.sleep(0.01)


def test_memory_is_lent_until_the_last_handle_goes_and_used_again(lender, peers, tmp_path):
    source = torch.arange(1 << 20)
    total, gate = int(source.sum()), tmp_path / "gate"
    handles = ShardRegistry(lender).put([source])
    answers = [peer.actor.run.remote(read_later, lender, handles, gate) for peer in peers]
    del handles
    assert lender.stats().shards == 1, "a call under way refers to it"
    gate.touch()
    assert ray.get(answers, timeout=240) == [(total, total + (1 << 20))] * 2
    until_empty(lender)
    for number in range(5):
        handles = ShardRegistry(lender).put([source + number])
        assert peers[0].call(read_later, lender, handles, gate)[0] == total + number * (1 << 20)
        del handles
        until_empty(lender)
    assert lender.stats().reserved_bytes <= 3 * (8 << 20), "memory is used again"


def test_idle_memory_is_given_back(ray_cluster):
    backend = NodeMemoryBackend(idle_s=0.0)
    handles = ShardRegistry(backend).put([torch.ones(1 << 18)])
    assert backend.stats().reserved_bytes
    del handles
    until_empty(backend)
    assert backend.stats().reserved_bytes == 0


def test_lent_memory_is_read_from_other_machines(lender, ray_cluster, monkeypatch):
    source = torch.arange(1 << 18, dtype=torch.bfloat16).reshape(512, -1)
    (handle,) = ShardRegistry(lender).put([source])
    monkeypatch.setattr(node_memory, "_machine", lambda: "another one")
    whole, rows = ShardRegistry(lender).fetch([handle, handle[5:7]], timeout_s=240)
    assert torch.equal(whole, source) and torch.equal(rows, source[5:7])
    lender.close()
    with pytest.raises(ShardLostError, match=handle.shard.shard_id):
        ShardRegistry(lender).fetch([handle], timeout_s=240)


def test_tensors_go_to_the_object_store_where_memory_is_not_lent(lender, ray_cluster, monkeypatch):
    registry, source = ShardRegistry(lender, RayRefBackend()), torch.arange(1 << 18)
    monkeypatch.setattr(node_memory, "memory_left", lambda: 1 << 20)
    (short,) = registry.put([source])
    monkeypatch.undo()
    monkeypatch.setattr(node_memory._ray, "machine_addresses", lambda: {"a", "b"})
    (spread,) = ShardRegistry(NodeMemoryBackend(), RayRefBackend()).put([source])
    assert [short.shard.scheme, spread.shard.scheme] == ["ray", "ray"]
    assert all(torch.equal(got, source) for got in registry.fetch([short, spread]))


def make(_, rows):
    return TensorArguments().encode({"ids": torch.ones(rows, 1024), "name": "made"})


def total_of(_, value):
    value = TensorArguments().decode(value)
    value["ids"] += 1
    return float(value["ids"].sum())


def test_borrowed_arguments_are_in_place_and_others_are_copies(ray_cluster):
    in_the_store = ShardRegistry(RayRefBackend())
    encoded = TensorArguments(registry=in_the_store).encode({"ids": torch.ones(1000, 1024)})
    borrowing = pickle.loads(pickle.dumps(TensorArguments(borrow=True)))
    first, second = (borrowing.decode(encoded)["ids"] for _ in range(2))
    assert first.data_ptr() == second.data_ptr() and torch.equal(first, torch.ones(1000, 1024))
    copy = TensorArguments().decode(encoded)["ids"]
    copy += 1
    assert torch.equal(first, torch.ones(1000, 1024)), "a write to a copy shows in the store"


def test_an_argument_is_each_workers_own(peers):
    transport, source = TensorArguments(), torch.ones(1000, 1024)
    encoded = transport.encode({"ids": source})
    source.zero_()
    answers = [peer.actor.run.remote(total_of, encoded) for peer in (*peers, peers[1])]
    assert ray.get(answers, timeout=240) == [2 * 1000 * 1024] * 3, "a write shows elsewhere"
    first, second = (transport.decode(encoded)["ids"] for _ in range(2))
    first += 5
    assert torch.equal(second, torch.ones(1000, 1024)), "a write shows in another reader"


def test_arguments_go_from_worker_to_worker_as_handles(peers):
    maker, user = peers
    result = maker.call(make, 1000)
    assert isinstance(result["ids"], RTensor) and result["name"] == "made"
    assert user.call(total_of, result) == user.call(total_of, result) == 2 * 1000 * 1024
    assert isinstance(maker.call(make, 2)["ids"], torch.Tensor), "small tensors travel as they are"


def outliving(backend):
    return TensorArguments(1024, registry=ShardRegistry(backend))


def make_outliving(backend, rows):
    return outliving(backend).encode({"ids": torch.full((rows, 1024), 2.0), "name": "made"})


def test_results_outlive_their_worker_where_a_store_owns_them(stores):
    maker = ActorPeer(stores)
    result = maker.call(make_outliving, 1000)
    lost = maker.call(make, 1000)
    maker.kill()
    assert isinstance(result["ids"], RTensor) and result["ids"] in ShardRegistry(stores)
    kept = outliving(stores).decode(result)["ids"]
    assert kept.shape == (1000, 1024) and kept.eq(2).all()
    assert result["ids"].with_registry(ShardRegistry(stores))[3:5].localize().eq(2).all()
    with pytest.raises(ShardLostError):
        lost["ids"].localize(timeout_s=60)
    release(result, ShardRegistry(stores))
    assert stores.stats().shards == 0


def test_a_handle_that_arrived_reads_itself(peers):
    result = peers[0].call(make, 1000)
    assert result["ids"].localize().eq(1).all()
    assert peers[1].call(sum_of, result["ids"][2:4]) == 2 * 1024


def sum_of(_backend, handle):
    return float(handle.localize().sum())


def test_arguments_leave_what_is_not_theirs(ray_cluster):
    from raycrew.tensor_transport import InlineBackend

    transport = pickle.loads(pickle.dumps(TensorArguments(min_bytes=0)))
    handle = ShardRegistry(InlineBackend()).put([torch.ones(3)])[0]
    assert transport.decode([handle])[0] is handle
    plain = {"a": [1, "b"]}
    assert transport.encode(plain) is plain and transport.decode(plain) is plain
    with pytest.raises(ValueError, match="min_bytes"):
        TensorArguments(min_bytes=-1)
