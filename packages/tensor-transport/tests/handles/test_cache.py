"""The cache of fetched shards: bounded, and shared by threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from raycrew.tensor_transport import (
    RTensor,
    ShardLostError,
    ShardRegistry,
    StaleHandleError,
    TensorShardInfo,
    TransportError,
    TransportTimeoutError,
)
from raycrew.tensor_transport.testing import InProcessBackend

THREADS, SHARDS, ROWS = 8, 12, 64


class Gated(InProcessBackend):
    """A backend whose reads are answered once they are let through."""

    def __init__(self):
        super().__init__()
        self.begun, self.gate = threading.Semaphore(0), threading.Event()
        self.counts, self.lock = {}, threading.Lock()
        self.fails = 0

    def fetch(self, reads, *, timeout_s=None):
        with self.lock:
            for read in reads:
                self.counts[read.shard.shard_id] = self.counts.get(read.shard.shard_id, 0) + 1
            failing, self.fails = self.fails > 0, self.fails - 1
            found = super().fetch(reads, timeout_s=timeout_s)
        self.begun.release()
        assert self.gate.wait(120)
        if failing:
            raise ShardLostError("its owner died")
        return found


def content(value):
    return torch.full((ROWS, 8), value)


def registry_of(cache_bytes):
    backend = Gated()
    registry = ShardRegistry(backend, cache_bytes=cache_bytes)
    return backend, registry, registry.put([content(value) for value in range(SHARDS)])


def test_threads_that_want_one_shard_fetch_it_once():
    backend, registry, (handle, *_) = registry_of(1 << 20)
    start = threading.Barrier(THREADS)

    def read(number):
        start.wait(60)
        (tensor,) = registry.fetch([handle], timeout_s=120)
        good = torch.equal(tensor, content(0))
        tensor.fill_(number)
        return good

    with ThreadPoolExecutor(THREADS) as pool:
        reads = [pool.submit(read, number) for number in range(THREADS)]
        assert backend.begun.acquire(timeout=120)
        backend.gate.set()
        assert all(done.result(120) for done in reads)
    assert backend.counts == {handle.shard.shard_id: 1}
    assert registry.cache_stats.hits == THREADS - 1 and registry.cache_stats.misses == 1
    assert torch.equal(registry.fetch([handle])[0], content(0)), "a write shows in the cache"


def test_nobody_waits_for_a_fetch_that_never_began():
    backend, registry, (handle, *_) = registry_of(1 << 20)
    backend.gate.set()
    elsewhere = RTensor(TensorShardInfo("unknown", "x", "owner", "", "float32", (1,)))
    with pytest.raises(TransportError, match="unknown"):
        registry.fetch([handle, elsewhere])
    assert torch.equal(registry.fetch([handle], timeout_s=0.1)[0], content(0))


def test_many_threads_and_shards_with_evictions():
    size = content(0).nbytes
    backend, registry, handles = registry_of(3 * size)
    backend.gate.set()

    def work(seed):
        order = torch.randperm(SHARDS, generator=torch.Generator().manual_seed(seed)).tolist()
        for a, b in zip(order, order[1:] + order[:1], strict=True):
            whole, other, rows = registry.fetch([handles[a], handles[b], handles[a][3:9]], timeout_s=120)
            if seed == 0 and a % 4 == 0:
                registry.expire(before_step=0)  # It empties the cache.
            if not (torch.equal(whole, content(a)) and torch.equal(other, content(b))):
                return False
            if not torch.equal(rows, content(a)[3:9]):
                return False
            for tensor in (whole, other, rows):
                tensor.fill_(-1)
            stats = registry.cache_stats
            if stats.held_bytes > 3 * size or stats.held_bytes != stats.shards * size:
                return False
        return True

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(work, range(4 * THREADS)))
    stats = registry.cache_stats
    assert stats.hits + stats.misses == 3 * 4 * THREADS * SHARDS
    assert stats.hits > 0 and stats.shards == 3


def test_a_shard_that_is_named_twice_in_one_call_is_fetched_once():
    backend, registry, (handle, *_) = registry_of(1 << 20)
    backend.gate.set()
    first, second = registry.fetch([handle, handle[:]])
    first.fill_(-1)
    assert torch.equal(second, content(0)) and sum(backend.counts.values()) == 1


def test_who_waits_for_a_fetch_that_fails_fetches_itself():
    backend, registry, (handle, *_) = registry_of(1 << 20)
    backend.fails = 1
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(registry.fetch, [handle], timeout_s=120)
        assert backend.begun.acquire(timeout=120)
        second = pool.submit(registry.fetch, [handle], timeout_s=120)
        while registry.cache_stats.hits == 0:
            assert not second.done()
        backend.gate.set()
        with pytest.raises(ShardLostError):
            first.result(120)
        assert torch.equal(second.result(120)[0], content(0))
    assert backend.counts[handle.shard.shard_id] == 2


def test_who_waits_for_another_thread_has_a_deadline():
    backend, registry, (handle, *_) = registry_of(1 << 20)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(registry.fetch, [handle], timeout_s=120)
        assert backend.begun.acquire(timeout=120)
        with pytest.raises(TransportTimeoutError, match="which another thread fetches, did not arrive"):
            registry.fetch([handle], timeout_s=0.1)
        backend.gate.set()
        assert torch.equal(first.result(120)[0], content(0))


def test_a_shard_released_while_it_is_fetched_is_not_kept():
    backend, registry, (handle, *_) = registry_of(1 << 20)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(registry.fetch, [handle], timeout_s=120)
        assert backend.begun.acquire(timeout=120)
        registry.release([handle.shard])
        backend.gate.set()
        assert torch.equal(first.result(120)[0], content(0))
    with pytest.raises(StaleHandleError):
        registry.fetch([handle])
    assert registry.cache_stats.shards == 0


def test_what_is_larger_than_the_cache_passes_it_by():
    backend, registry, (handle, *_) = registry_of(100)
    backend.gate.set()
    for _ in range(2):
        assert torch.equal(registry.fetch([handle])[0], content(0))
    assert backend.counts[handle.shard.shard_id] == 2 and registry.cache_stats.shards == 0
    with pytest.raises(ValueError, match="must not be negative"):
        ShardRegistry(InProcessBackend(), cache_bytes=-1)
