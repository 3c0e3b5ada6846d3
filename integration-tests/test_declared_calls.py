"""Methods that say how they are called, with batches, arrays and tensors."""

import numpy as np
import pytest
import torch

from raycrew.cluster_core import RayVirtualCluster
from raycrew.cluster_core.testing import FakeCluster
from raycrew.tensor_transport import (
    BatchedDataDict,
    RaggedTensor,
    ShardRegistry,
    TensorArguments,
    localize,
)
from raycrew.tensor_transport.testing import InProcessBackend
from raycrew.worker_groups import (
    NamedSharding,
    RayWorkerGroup,
    ResultJoinError,
    current_worker,
    sharded,
)
from raycrew.worker_groups.testing import InProcessGroup

AXES = NamedSharding([[0, 1], [2, 3]], ["dp", "tp"])


class Policy:
    @sharded("dp", pad=True)
    def logprobs(self, batch):
        return BatchedDataDict({"logprobs": -batch["ids"].float(), "text": batch["text"]})

    @sharded("dp")
    def echo(self, batch):
        return batch

    @sharded("dp")
    def generate(self, batch):
        """More rows on later ranks."""
        return batch.repeat_interleave(1 + current_worker().rank)

    @sharded("dp", collect="mean")
    def loss(self, batch):
        return {"loss": batch["ids"].float().mean(), "rows": batch.size}

    @sharded("dp", collect="sum")
    def total(self, batch):
        return batch["ids"]

    @sharded("dp", pad=True, split=["ids", "mask"])
    def rows(self, ids, mask):
        return {"ids": ids, "mask": (mask, [int(i) for i in ids])}

    @sharded("dp")
    def scalar(self, batch):
        return torch.ones(())


def batch_of(n):
    ragged = RaggedTensor.from_rows([torch.arange(i + 1) for i in range(n)])
    text = [f"row {i}" for i in range(n)]
    return BatchedDataDict({"ids": torch.arange(n), "text": text, "ragged": ragged}, metadata={"step": 3})


@pytest.fixture(scope="module")
def group():
    with InProcessGroup(FakeCluster([4]), Policy, sharding_annotations=AXES) as made:
        yield made


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_batches_are_split_padded_and_joined(group, n):
    result = group.call(Policy.logprobs, batch_of(n)).get_results()
    assert result == BatchedDataDict({"logprobs": -torch.arange(n).float(), "text": batch_of(n)["text"]})
    whole = batch_of(2 * n)
    echo = group.call(Policy.echo, whole).get_results()
    assert echo == whole
    assert echo.metadata == {"step": 3}
    assert group.call(Policy.loss, whole).get_results() == {"loss": (2 * n - 1) / 2, "rows": n}
    ids, mask = torch.arange(n), np.ones((n, 2))
    rows = group.call(Policy.rows, ids, mask).get_results()
    assert torch.equal(rows["ids"], ids)
    assert rows["mask"][0].shape == (n, 2)
    assert rows["mask"][1] == list(range(n))


@pytest.mark.hostile
def test_what_does_not_fit_is_refused(group):
    with pytest.raises(ValueError, match="5 rows of batch don't divide among the 2 coordinates of axis 'dp'"):
        group.call(Policy.echo, batch_of(5))
    with pytest.raises(ValueError, match="batch has no rows"):
        group.call(Policy.echo, BatchedDataDict())
    with pytest.raises(ValueError, match="different numbers of rows: ids has 3, mask has 2"):
        group.call(Policy.rows, torch.arange(3), np.ones(2))
    with pytest.raises(TypeError, match="Tensor without dimensions"):
        group.call(Policy.echo, torch.ones(()))
    with pytest.raises(ResultJoinError, match="Tensor without dimensions"):
        group.call(Policy.scalar, [1, 2]).get_results()


def test_shards_that_were_dealt_keep_their_order(group):
    dealt = batch_of(6).shard_by_batch_size(2, batch_size=6)
    result = group.call(Policy.echo, dealt).get_results()
    assert result["ids"].tolist() == list(dealt.order)


def test_handles_are_joined_without_their_bytes():
    transport = TensorArguments(min_bytes=0, registry=ShardRegistry(InProcessBackend()))
    with InProcessGroup(FakeCluster([4]), Policy, sharding_annotations=AXES, transport=transport) as group:
        for method in (Policy.echo, Policy.generate):
            joined = group.call(method, batch_of(4)).get_results()
            there = transport.decode(joined)
            assert there["ids"].tolist() == (
                [0, 1, 2, 3] if method is Policy.echo else [0, 1, *[2] * 3, *[3] * 3]
            )
        assert group.call(Policy.total, batch_of(4)).get_results().tolist() == [2, 4]
        again = group.call(Policy.echo, group.call(Policy.echo, batch_of(4)).get_results()).get_results()
        assert transport.decode(again)["text"] == batch_of(4)["text"]
    mixed = TensorArguments(min_bytes=40, registry=ShardRegistry(InProcessBackend()))
    with InProcessGroup(FakeCluster([4]), Policy, sharding_annotations=AXES, transport=mixed) as group:
        joined = group.call(Policy.generate, batch_of(4)).get_results()
        assert mixed.decode(joined)["ids"].tolist() == [0, 1, *[2] * 3, *[3] * 3]


@pytest.mark.slow
@pytest.mark.parametrize("axes", [[[0], [1]], pytest.param([[0, 1], [2, 3]], marks=pytest.mark.long)])
def test_batches_go_over_ray_as_handles_and_come_back_as_in_one_process(local_ray, axes):
    tensors, sharding = TensorArguments(min_bytes=64), NamedSharding(axes, ["dp", "tp"])
    world_size = sharding.size
    with (
        InProcessGroup(FakeCluster([world_size]), Policy, sharding_annotations=sharding) as group,
        RayVirtualCluster([world_size], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Policy, sharding_annotations=sharding, transport=tensors) as on_ray,
    ):
        for n in (64, 65):
            batch = batch_of(n)
            there = on_ray.call(Policy.logprobs, batch).get_results(timeout=60)
            assert localize(there) == group.call(Policy.logprobs, batch).get_results(), (
                "padded where it has to be"
            )
        whole = batch_of(64)
        assert localize(on_ray.call(Policy.echo, whole).get_results(timeout=60)) == whole
        generated = localize(on_ray.call(Policy.generate, whole).get_results(timeout=60))
        assert generated == group.call(Policy.generate, whole).get_results()
        assert on_ray.call(Policy.loss, whole).get_results(timeout=60) == {
            "loss": whole["ids"].float().mean(),
            "rows": 32,
        }
