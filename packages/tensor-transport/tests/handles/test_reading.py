"""Handles that know how to be read, and what a registry has of them."""

import copy
import pickle

import pytest
import torch

from raycrew.tensor_transport import (
    BatchedDataDict,
    InlineBackend,
    RTensor,
    ShardRegistry,
    StaleHandleError,
    TransportError,
    collect_shards,
    localize,
    remotize,
)
from raycrew.tensor_transport.testing import InProcessBackend

TABLE = torch.arange(12.0).view(6, 2)


class OverNetwork(InProcessBackend):
    """Its reads are cached."""

    reads_over_network = True

    def __init__(self):
        super().__init__()
        self.asked = 0

    def fetch(self, reads, *, timeout_s=None):
        self.asked += 1
        return super().fetch(reads, timeout_s=timeout_s)


class TestLocalize:
    def test_with_the_registry_that_put_it(self):
        handle = ShardRegistry(InProcessBackend()).put([TABLE])[0]
        assert handle.localize().equal(TABLE)
        assert handle[[4, 1], 1:].localize().equal(TABLE[[4, 1], 1:])
        assert RTensor.concat(handle.split(2)[::-1]).localize().equal(TABLE[[3, 4, 5, 0, 1, 2]])
        assert copy.deepcopy(handle).localize().equal(TABLE)
        assert localize({"a": [handle]})["a"][0].equal(TABLE)

    def test_trimmed_padding_is_restored_when_asked(self):
        mask = torch.tensor([[1, 1, 0]] * 2)
        ids = torch.tensor([[1, 2, 9]] * 2)
        registry = ShardRegistry(InProcessBackend())
        handle = remotize({"ids": ids, "attention_mask": mask}, registry, trim=True)["ids"]
        assert handle.localize().equal(ids[:, :2])
        assert handle.localize(pad=True).equal(ids)

    def test_in_another_process_where_backends_need_to_know_nothing(self):
        handle = ShardRegistry(InlineBackend()).put([TABLE])[0]
        arrived = pickle.loads(pickle.dumps(handle))
        assert arrived == handle and arrived.registry is not handle.registry
        assert arrived[2:].localize().equal(TABLE[2:])
        assert pickle.loads(pickle.dumps(arrived)).localize().equal(TABLE)
        several = pickle.loads(pickle.dumps([handle, handle[1:]]))
        assert several[0].registry is several[1].registry
        assert RTensor.concat([arrived, handle]).localize().equal(torch.cat([TABLE, TABLE]))
        assert localize([arrived, handle])[1].equal(TABLE)

    def test_a_handle_takes_no_addresses_along(self):
        registry = ShardRegistry(InProcessBackend(), inline=InlineBackend(), inline_bytes=8)
        handle = registry.put([TABLE])[0]
        arrived = pickle.loads(pickle.dumps(handle))
        assert arrived.registry is None
        for read in (arrived.localize, lambda: localize(BatchedDataDict(x=arrived))):
            with pytest.raises(TransportError, match=r"came without a registry: .*a backend for memory"):
                read()
        assert arrived.with_registry(registry).localize().equal(TABLE)
        assert localize(arrived, registry).equal(TABLE)
        small = registry.put([TABLE[0, :1]])[0]
        assert pickle.loads(pickle.dumps(small)).localize().equal(TABLE[0, :1])

    def test_made_by_hand(self):
        shard = ShardRegistry(InlineBackend()).put([TABLE])[0].shard
        with pytest.raises(TransportError, match="came without a registry"):
            RTensor(shard).localize()


class TestMembership:
    def test_of_handles_that_can_be_read(self):
        here, there = ShardRegistry(InlineBackend()), ShardRegistry(InProcessBackend())
        handle = here.put([TABLE])[0]
        assert handle in here and handle not in there
        assert handle in handle.registry and pickle.loads(pickle.dumps(handle)).registry.__contains__(handle)
        assert TABLE not in here and "x" not in here
        both = ShardRegistry(InlineBackend(), InProcessBackend())
        joined = RTensor.concat([handle, there.put([TABLE])[0]])
        assert joined in both and joined not in here
        assert (
            joined.registry is None
            and localize(joined, ShardRegistry(InlineBackend(), *there.backends.values())).shape
        )

    def test_of_the_cache_and_dropping_without_release(self):
        backend = OverNetwork()
        registry = ShardRegistry(backend, cache_bytes=1 << 20)
        handle, other = registry.put([TABLE, TABLE + 1])
        assert not registry.is_cached(handle)
        handle.localize(), other.localize()
        assert registry.is_cached(handle) and registry.is_cached(RTensor.concat([handle, other]))
        registry.drop_cached([handle[:0], handle])
        handle.localize()
        registry.drop_cached(handle)
        for wrong in ([TABLE], BatchedDataDict(x=handle), [None, other]):
            with pytest.raises(TypeError, match=r"not a \w+; see collect_shards\(value\)"):
                registry.drop_cached(wrong)
        assert not registry.is_cached(handle) and registry.is_cached(other)
        handle.localize()
        registry.drop_cached(collect_shards({"a": [BatchedDataDict(x=handle)]}))
        assert not registry.is_cached(handle) and registry.is_cached(other)
        assert registry.cache_stats.shards == 1
        asked = backend.asked
        assert handle.localize().equal(TABLE) and backend.asked == asked + 1
        registry.release(handle.shards)
        assert not registry.is_cached(handle)
        with pytest.raises(StaleHandleError):
            handle.localize()
