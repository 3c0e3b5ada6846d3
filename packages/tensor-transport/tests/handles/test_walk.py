"""Objects of all kinds, with handles in place of their tensors and back."""

import collections
import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from batches import assert_same, same

from raycrew.tensor_transport import (
    BatchedDataDict,
    InlineBackend,
    RTensor,
    ShardLostError,
    ShardRegistry,
    SharedMemoryBackend,
    TensorArguments,
    TransportError,
    clear_node,
    collect_shards,
    flatten_shard_ids,
    localize,
    release,
    remotize,
)
from raycrew.tensor_transport.testing import InProcessBackend


@pytest.fixture
def registry():
    return ShardRegistry(InProcessBackend())


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    tokens: torch.Tensor
    name: str = "frozen"


@dataclasses.dataclass
class Checked:
    """One that looks at its fields, and computes some."""

    tokens: torch.Tensor
    total: torch.Tensor = dataclasses.field(init=False)
    made: int = dataclasses.field(default=0, init=False)

    def __post_init__(self):
        assert self.tokens.shape[0] == 4, "made from something else"
        self.total = self.tokens.sum(dim=1)
        self.made += 1


class Trajectories(dict):
    """A dict with something beside its items."""

    source = "nowhere"


class Rows(list):
    pass


def test_containers_keep_their_class_and_are_not_made_anew(registry):
    checked, many = Checked(torch.ones(4, 3)), collections.defaultdict(list, a=[torch.zeros(2)])
    trajectories = Trajectories(ids=torch.arange(3), n=1)
    trajectories.source = "rollout"
    value = [Frozen(torch.eye(2)), checked, many, trajectories, Rows([torch.ones(1)]), (1, torch.ones(2))]
    remote = pickle.loads(pickle.dumps(remotize(value, registry)))
    assert len(collect_shards(remote)) == 7
    local = localize(remote, registry)
    assert [type(item) for item in local] == [type(item) for item in value] == [type(item) for item in remote]
    assert same(local[0].tokens, torch.eye(2)) and local[0].name == "frozen"
    assert same(local[1].tokens, checked.tokens) and same(local[1].total, checked.total)
    assert local[1].made == 1, "made anew"
    assert same(local[2]["a"], [torch.zeros(2)]) and local[2]["more"] == []
    assert same(dict(local[3]), dict(trajectories)) and local[3].source == "rollout"
    assert isinstance(checked.tokens, torch.Tensor), "the original is not changed"


def test_one_tensor_or_container_in_two_places_stays_one(registry):
    tensor, shared = torch.arange(4), {"x": torch.ones(3)}
    local = localize(remotize([tensor, {"again": tensor}, shared, (shared,)], registry), registry)
    assert local[0] is local[1]["again"] and local[2] is local[3][0]
    assert registry.stats()["memory"].put_shards == 2


def test_what_contains_itself_is_refused_and_passes_as_an_argument(registry):
    ring = [torch.ones(3)]
    ring.append({"self": ring})
    for act in (remotize, localize):
        with pytest.raises(ValueError, match="a list contains itself"):
            act(ring, registry)
    transport = TensorArguments(0, registry=registry)
    assert transport.encode(ring) is ring and transport.decode(ring) is ring


def test_arguments_without_plain_bytes_pass_as_they_are(registry):
    transport = TensorArguments(0, registry=registry)
    odd = {"sparse": torch.eye(3).to_sparse(), "meta": torch.ones(3, device="meta")}
    assert transport.encode(odd) is odd
    found = transport.encode(odd | {"plain": torch.ones(3)})
    assert found["sparse"] is odd["sparse"] and isinstance(found["plain"], RTensor)
    assert same(transport.decode(found)["plain"], torch.ones(3))


class InPlace(InProcessBackend):
    """Gives the very memory that it holds, as a mapping of shared memory does."""

    gives_own_memory = False

    def fetch(self, reads, *, timeout_s=None):
        return [read.of(self._held[read.shard.shard_id]) for read in reads]


@pytest.mark.parametrize(("options", "seen"), [({}, False), ({"borrow": True}, True)])
def test_arguments_are_the_workers_own_unless_they_are_borrowed(options, seen):
    transport = TensorArguments(0, registry=ShardRegistry(InPlace()), **options)
    remote = transport.encode([torch.zeros(3)])
    transport.decode(remote)[0].add_(1)
    assert transport.decode(remote)[0].any().item() is seen


@pytest.mark.parametrize(("min_bytes", "stored"), [(0, [0, 8, 16]), (9, [16]), (16, [16]), (17, [])])
def test_tensors_from_the_named_size_on_travel_as_handles(registry, min_bytes, stored):
    sent = [torch.zeros(size, dtype=torch.uint8) for size in (0, 8, 16)]
    found = TensorArguments(min_bytes, registry=registry).encode(sent)
    assert [
        len(tensor) for tensor, each in zip(sent, found, strict=True) if isinstance(each, RTensor)
    ] == stored
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        TensorArguments(-1, registry=registry)


def test_only_some_tensors_are_stored(registry):
    value = {"a": torch.ones(3), "b": torch.ones(3, dtype=torch.int64)}
    remote = remotize(value, registry, only=torch.is_floating_point)
    assert isinstance(remote["a"], RTensor) and remote["b"] is value["b"]
    kept = localize(remotize(value, registry), registry, only=lambda handle: handle.dtype == torch.int64)
    assert isinstance(kept["a"], RTensor) and same(kept["b"], value["b"])


def trajectory():
    mask = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0]])
    return {
        "attention_mask": mask,
        "ids": mask * 7 - 1,
        "logprobs": (mask * 0.5).to(torch.bfloat16)[:, :, None].expand(2, 6, 4).contiguous(),
        "loss_mask": mask.bool(),
        "reward": torch.ones(2),
        "text": ["a", "b"],
    }


@pytest.mark.parametrize("make", [dict, BatchedDataDict, lambda value: {"deep": [BatchedDataDict(value)]}])
def test_padding_is_not_stored_and_there_on_demand(registry, make):
    value = make(trajectory())
    remote = remotize(value, registry, trim=True)
    inner = remote["deep"][0] if "deep" in remote else remote
    assert inner["ids"].shape == (2, 3) and inner["logprobs"].shape == (2, 3, 4)
    assert inner["loss_mask"].shape == (2, 3) and inner["reward"].shape == (2,)
    held = registry.stats()["memory"].held_bytes
    assert held == 2 * 3 * (8 + 8 + 4 * 2 + 1) + 2 * 4
    for pad, width in ((True, slice(None)), (False, slice(1, 4))):
        local = localize(pickle.loads(pickle.dumps(remote)), registry, pad=pad)
        local = local["deep"][0] if "deep" in local else local
        for key, column in trajectory().items():
            wanted = (
                column[:, width].clone() if isinstance(column, torch.Tensor) and column.ndim > 1 else column
            )
            assert same(local[key], wanted), (key, pad)


def test_padding_of_no_token_at_all_is_kept(registry):
    value = trajectory() | {"attention_mask": torch.zeros(2, 6, dtype=torch.int64)}
    assert remotize(value, registry, trim=True)["ids"].shape == (2, 6)


@pytest.mark.hostile
@pytest.mark.parametrize("make", [dict, BatchedDataDict])
@pytest.mark.parametrize("why", ["two values", "too small", "not wanted"])
def test_what_cannot_be_trimmed_keeps_the_width_of_all(registry, make, why):
    value = trajectory()
    if why == "two values":
        value["ids"][0, 0], value["ids"][1, 5] = 41, 42
    options = {
        "two values": {},
        "too small": {"min_bytes": value["loss_mask"].nbytes + 1},
        "not wanted": {"only": lambda tensor: tensor.dtype != torch.bool},
    }[why]
    remote = remotize(make(value), registry, trim=True, **options)
    assert {remote[key].shape[1] for key in ("attention_mask", "ids", "logprobs", "loss_mask")} == {6}
    local = localize(remote, registry)
    assert all(same(local[key], value[key]) for key in value)


def test_replicas_are_made_read_and_released():
    first, second = InProcessBackend("first"), InProcessBackend("second")
    registry = ShardRegistry(first, second, inline=InlineBackend(), inline_bytes=10)
    value = {"x": torch.arange(12).reshape(4, 3), "tiny": torch.ones(2)} | trajectory()
    remote = remotize(value, registry, replicas=["second", "first"], trim=True, step=1)
    assert first.stats().held_bytes == second.stats().held_bytes > 0
    first.close()  # What it held is lost.
    local = localize(pickle.loads(pickle.dumps(remote)), registry, pad=True)
    assert all(same(local[key], value[key]) for key in value)
    release(remote, registry)
    assert second.stats().shards == 0
    with pytest.raises(
        ShardLostError, match=r"shard \w+ of owner memory on node unknown is lost, and so are its 1 rep"
    ):
        localize(remote, registry)
    with pytest.raises(ValueError, match=r"no backends for \['third'\]; there are: first, second, inline"):
        registry.put([torch.ones(3)], replicas=["third"])


def test_a_replica_that_can_not_be_made_leaves_nothing_behind(tmp_path):
    first = InProcessBackend("first")
    small = SharedMemoryBackend(arena_bytes=4096, max_bytes=4096)
    registry = ShardRegistry(first, small)
    with pytest.raises(TransportError, match="max_bytes=4096"):
        registry.put([torch.ones(10_000)], replicas=["shared_memory"])
    assert first.stats().shards == small.stats().shards == 0
    small.close()


def test_one_lost_shard_of_several_is_not_blamed_on_replicas():
    first, second = InProcessBackend("first"), InProcessBackend("second")
    registry = ShardRegistry(first, second)
    (safe,) = registry.put([torch.ones(3)], replicas=["second"])
    (gone,) = registry.put([torch.zeros(3)])
    first.close()
    with pytest.raises(TransportError, match=f"shard {gone.shard.shard_id} was released"):
        registry.fetch([safe, gone])
    assert same(registry.fetch([safe])[0], torch.ones(3))


def test_a_node_without_a_store_can_not_be_cleared(registry):
    with pytest.raises(
        TransportError, match="no backend keeps a store on node 'n'; they keep some on memory: no node"
    ):
        clear_node("n", registry)


def test_a_machine_is_cleared_as_a_node():
    backend = SharedMemoryBackend()
    registry = ShardRegistry(InlineBackend(), backend)
    (shard, _) = backend.put([torch.ones(3), torch.ones(5)], step=3)
    assert clear_node(shard.node_id, registry) == 2 and backend.stats().shards == 0
    backend.close()


def test_a_large_batch_of_many_shards_is_read_in_one_request():
    backend = InProcessBackend()
    registry = ShardRegistry(backend)
    parts = [torch.full((8, 2), number) for number in range(2000)]
    handles = registry.put(parts)
    batch = BatchedDataDict(x=RTensor.concat(handles), y=list(range(16_000)))
    order = np.random.default_rng(0).permutation(16_000)
    picked = batch.select_indices(order)
    assert len(flatten_shard_ids([batch, picked, handles])) == 2000
    assert backend.fetches == 0
    local = localize(picked, registry)
    assert_same(local.reorder_data(order), BatchedDataDict(x=torch.cat(parts), y=list(range(16_000))))
    assert backend.fetches == 1
    assert copy.copy(handles[0]).shape == (8, 2)
