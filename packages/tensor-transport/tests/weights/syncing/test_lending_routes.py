"""Buckets that a route lends: nothing is copied for a receiver that borrows, and nothing changes under it."""

import gc
import threading

import numpy as np
import pytest
import streaming
import torch
from models import assert_same, weights
from processes import MakingPeer
from streaming import TIMEOUT_S, sync

from raycrew.tensor_transport import (
    RouteStore,
    WeightDirectory,
    WeightPublisher,
    WeightReceiver,
    WeightRoute,
    WeightUpdateError,
)
from raycrew.tensor_transport.transports import SharedMemoryTransport
from raycrew.tensor_transport.weights._receiving import fetching
from raycrew.tensor_transport.weights._routing import Route, store
from raycrew.tensor_transport.weights._update import stores

SHARED = Route("shared", "shared_memory", "shared_memory", "")
TCP = Route("tcp", "tcp", "tcp", "")


class Trainer(streaming.Trainer):
    def __init__(self, directory, memory):
        self.store = RouteStore({"shared_memory": memory})
        super().__init__(self.store, directory)

    def join_route(self, told):
        return self.store.join(told)


class Keeper(streaming.Generator):
    """Keeps the very tensors that it was handed."""

    def __init__(self, directory, memory, borrow=True):
        self.store = RouteStore({"shared_memory": memory})
        super().__init__(self.store, directory, rollback="shadow", borrow=borrow)
        self.kept, self.fails = [], False

    def join_route(self, told):
        return self.store.join(told)

    def load(self, tensors):
        self.kept.append({})
        for name, tensor in tensors:
            self.kept[-1][name] = tensor
            if self.fails and name == "layer.2.weight":
                self.fails = False
                raise RuntimeError("no room")

    def prepare_weights(self, version):
        self.prepared = super().prepare_weights(version)
        return self.prepared


@pytest.fixture
def copied(monkeypatch):
    """How many bytes were copied for a receiver alone."""
    sizes, copy = [], fetching.private_copy

    def counted(tensor):
        sizes.append(tensor.nbytes)
        return copy(tensor)

    for module in (fetching, store):
        monkeypatch.setattr(module, "private_copy", counted)
    return sizes


@pytest.mark.parametrize("borrow", [True, False])
@pytest.mark.parametrize("transport", ["shared_memory", "tcp", "gloo"])
def test_a_bucket_is_copied_once_at_most_and_not_for_a_receiver_that_borrows(transport, borrow, copied):
    with (
        SharedMemoryTransport() as memory,
        WeightDirectory.local() as directory,
        WeightRoute(transport, timeout_s=TIMEOUT_S) as route,
    ):
        trainer, generator = Trainer(directory, memory), Keeper(directory, memory, borrow)
        for seed in (1, 2):
            trainer.seed = seed
            options = {"route": route, "prepare": "prepare_weights", "publish": "publish_mapping"}
            sync([trainer], [generator], directory, **options)
            assert_same(generator.kept[-1], weights(seed))
            is_copied = transport == "shared_memory" and not borrow
            assert sum(copied) == (generator.prepared.size_bytes if is_copied else 0)
            copied.clear()
        for each in (trainer, generator):
            each.store.close()


class Watched(SharedMemoryTransport):
    """Notes which threads map."""

    def __init__(self):
        super().__init__()
        self.threads = set()

    def map(self, offer, *, timeout_s=None):
        self.threads.add(threading.current_thread().name.split("_")[0])
        return super().map(offer, timeout_s=timeout_s)


@pytest.mark.parametrize("is_mapping", [True, False])
def test_shared_memory_that_is_chosen_is_used_as_where_it_is_given(is_mapping, monkeypatch):
    """Buckets are large there, and none needs a thread; over each other route they are as they were."""
    monkeypatch.setattr(store._ray, "is_connected", lambda: False)  # Else it has what no route is chosen for.
    monkeypatch.setattr(stores, "_BUCKET_BYTES", 256)
    monkeypatch.setattr(stores, "_SHARED_BUCKET_BYTES", 1024)
    tensors = {f"w{i}": torch.full((256,), i, dtype=torch.uint8) for i in range(12)}
    with Watched() as memory, WeightDirectory.local() as directory:
        ours, theirs = (RouteStore({"shared_memory": memory}) for _ in range(2))
        publisher, got = WeightPublisher(ours, directory=directory, checksums=False), {}
        receiver = WeightReceiver(got.update, store=theirs, borrow=True, verify=False, directory=directory)

        def update(route):
            memory.threads.clear()
            for each in (ours, theirs):
                each.join(route)
            update = publisher.publish(tensors if is_mapping else iter(tensors.items()))
            receiver.apply(update.version)
            assert_same(got, tensors)
            return len(update.buckets), set(memory.threads)

        few, many = (3, {"MainThread"}), (12, {"MainThread", "weight-fetch"})
        kept = Route("kept", "tcp", "shared_memory", "")
        assert [update(route) for route in (None, SHARED, kept, SHARED)] == [many, few, many, few]
        assert update(TCP) == (12, set())
        for each in (publisher, receiver, ours, theirs):
            each.close()


@pytest.mark.hostile
def test_tensors_that_a_receiver_keeps_stay_as_they_are_whatever_comes_after(copied):
    with (
        SharedMemoryTransport(arena_bytes=1 << 13) as memory,
        WeightDirectory.local(keep=1) as directory,
        WeightRoute("shared_memory", timeout_s=TIMEOUT_S) as shared,
        WeightRoute("gloo", timeout_s=TIMEOUT_S) as gloo,
    ):
        trainer, generator = Trainer(directory, memory), Keeper(directory, memory)

        def update(seed, route=shared, prepare="prepare_weights"):
            trainer.seed = seed
            sync([trainer], [generator], directory, route=route, prepare=prepare, publish="publish_mapping")
            return weights(seed)

        held = [update(1), update(2, prepare=None)]
        generator.fails = True
        with pytest.raises(WeightUpdateError, match="no room"):
            update(3)
        partly = generator.kept.pop(2)
        assert 0 < len(partly) < len(weights(3))
        held.append(held[1])  # It returned to it, from where it was lent.
        held += [update(seed) for seed in range(4, 8)]
        assert not copied
        held += [update(8, gloo), update(9, gloo), update(10)]
        assert all(generator.receiver.pull(timeout_s=TIMEOUT_S).size_bytes == 0 for _ in range(2))
        for each in (trainer, generator):
            each.store.close()
    gc.collect()
    assert len(generator.kept) == len(held)
    for kept, published in zip(generator.kept, held, strict=True):
        assert_same(kept, published)
    assert_same(partly, {name: weights(3)[name] for name in partly})


def put_again(stored, values):
    """Run by a peer: it releases what it had put before, and puts other buckets."""
    route_store, tickets = stored
    while tickets:
        route_store.release(tickets.pop())
    tickets += [route_store.put(np.full(1 << 16, value, np.uint8)) for value in values]
    return list(tickets)


@pytest.mark.hostile
def test_lent_buckets_are_not_written_to_while_their_publisher_goes_on_or_when_it_is_killed():
    peer, held = MakingPeer(make_joined), []
    try:
        with RouteStore() as reader:
            reader.join(SHARED)
            for turn in range(8):
                tickets = peer.call(put_again, [10 * turn + i for i in range(8)])
                held.append([reader.get_tensor(ticket, TIMEOUT_S) for ticket in tickets])
            del held[1::2]  # These arenas may be used anew.
            for turn in range(8, 12):
                peer.call(put_again, [10 * turn + i for i in range(8)])
            peer.kill()
        found = [[set(bucket.tolist()) for bucket in buckets] for buckets in held]
        assert found == [[{10 * turn + i} for i in range(8)] for turn in range(0, 8, 2)]
    finally:
        peer.kill()


def make_joined():
    made = RouteStore()
    made.join(SHARED)
    return made, []


@pytest.mark.hostile
def test_what_was_lent_is_never_taken_for_memory_of_ones_own_whatever_is_joined_since():
    with SharedMemoryTransport(arena_bytes=1 << 16) as memory, RouteStore({"shared_memory": memory}) as ours:
        ours.join(Route("kept", "tcp", "shared_memory", ""))
        ticket = ours.put(np.arange(9, dtype=np.uint8))
        ours.get(ticket)[:] = 0
        assert ours.gives_own_memory
        ours.join(SHARED)
        first, second = (ours.get_tensor(ticket) for _ in range(2))
        assert first.data_ptr() == second.data_ptr(), "in place"
        for route in (None, TCP):
            ours.join(route)
            assert not ours.gives_own_memory
            with pytest.raises(ValueError, match="read-only"):
                ours.get(ticket)[:] = 0
            assert ours.get(ticket).tolist() == list(range(9))
        assert torch.equal(first, torch.arange(9, dtype=torch.uint8))
        ours.release(ticket)
