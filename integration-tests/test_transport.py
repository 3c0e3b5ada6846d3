"""Tensors that go from group to group as handles."""

import asyncio
import gc

import pytest
from tensor_workers import Maker, Reader

from raycrew.cluster_core import RayVirtualCluster
from raycrew.tensor_transport import BatchedDataDict, RTensor, TensorArguments
from raycrew.worker_groups import RayWorkerGroup
from raycrew.worker_groups.scheduling import Job, RayScheduler

N = 1 << 20


def test_results_stay_handles_on_the_driver_and_become_tensors_in_the_next_group(local_ray):
    tensors = TensorArguments(min_bytes=1024)
    with (
        RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=2) as cluster,
        RayWorkerGroup(cluster, Maker, transport=tensors) as makers,
        RayWorkerGroup(cluster, Reader, transport=tensors) as readers,
    ):
        made = makers.call(Maker.make, N).get_results(timeout=60)
        assert [type(one["values"]) for one in made] == [RTensor, RTensor]
        assert made[0]["values"].shape == (N,)
        assert made[0]["name"] == "threes"
        totals = readers.run_all_workers_multiple_data("total", data=made).get_results(timeout=60)
        assert totals == [4.0 * N, 4.0 * N]
        again = readers.run_all_workers_multiple_data("total", data=made).get_results(timeout=60)
        assert again == totals


def test_an_engines_results_stay_handles_and_become_tensors_in_the_next_engine(local_ray):
    with RayScheduler(transport=TensorArguments(min_bytes=1024), call_timeout_s=60) as scheduler:
        maker, reader = scheduler.create_workers(Job("actor", 2))
        scheduler.create_engine(maker, "tensor_workers.Maker")
        scheduler.create_engine(reader, "tensor_workers.Reader")
        made = scheduler.call_engine(maker, "make", None, N)
        gc.collect()
        assert (type(made["values"]), made["name"]) == (RTensor, "threes")
        assert scheduler.call_engine(reader, "total", None, made) == 4.0 * N
        assert asyncio.run(scheduler.async_call_engine(reader, "total", None, data=made)) == 4.0 * N
        assert made["values"].localize().sum().item() == 3.0 * N


def test_a_batch_is_sharded_over_ranks_and_joined_again(local_ray):
    batch = BatchedDataDict(values=list(range(7)))
    with (
        RayVirtualCluster([3], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Doubler) as group,
    ):
        parts = group.run_all_workers_multiple_data("double", batch=batch.shard(3)).get_results(timeout=60)
        planned = batch.shard_by_batch_size(
            3, sequence_packing_args={"max_tokens_per_microbatch": 6, "input_lengths_key": "values"}
        )
        # Not taken apart: still each rank gets its shard, and nobody gets the order.
        packed = group.run_all_workers_multiple_data("double", batch=planned).get_results(timeout=60)
        with pytest.raises(ValueError, match="sharded into 2, and 3 shards are needed"):
            group.run_all_workers_multiple_data(
                "double", batch=batch.shard_by_batch_size(2, allow_uneven_shards=True)
            )
    assert BatchedDataDict.concat(packed).reorder_data(planned.order)["values"] == [0, 2, 4, 6, 8, 10, 12]
    assert [part.size for part in parts] == [3, 2, 2]
    assert BatchedDataDict.concat(parts)["values"] == [0, 2, 4, 6, 8, 10, 12]


class Doubler:
    def double(self, batch):
        return BatchedDataDict(values=[2 * value for value in batch["values"]])
