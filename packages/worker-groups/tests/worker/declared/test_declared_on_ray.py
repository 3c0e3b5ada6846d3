import asyncio
import sys

import pytest
import ray
from declared_workers import Batch, Policy, Stoic

from raycrew.cluster_core import RayVirtualCluster
from raycrew.worker_groups import NamedSharding, RayWorkerGroup, WorkerFailureError

PAIR = NamedSharding([0, 1], ["dp"])

FAR = """
from raycrew.worker_groups import replicated, sharded

def shortest(results):
    return min(results, key=len)

class Far:
    @sharded("dp")
    def double(self, rows):
        return [2 * row for row in rows]

    @sharded("dp", collect=shortest)
    def shortest(self, rows):
        return rows
"""


@pytest.mark.smoke
def test_one_value_of_several_ranks_wherever_it_is_asked_for(cluster):
    with RayWorkerGroup(cluster, Policy, sharding_annotations=PAIR) as group:
        future = group.call(Policy.score, [1, 2, 3])
        assert future.get_results() == [10, 20, 30]
        assert dict(future.as_completed()) == {0: [10, 20], 1: [30]}
        assert len(ray.get(future)) == 2

        async def awaited():
            return await asyncio.gather(group.call(Policy.train, Batch("ab")), future)

        assert asyncio.run(awaited()) == [Batch("ab"), [10, 20, 30]]
        elsewhere = ray.remote(num_cpus=0)(lambda boxed: boxed[0].get_results())
        assert ray.get(elsewhere.remote([future])) == [10, 20, 30]
        assert group.call(Policy.take, future).get_results() == [[10, 20, 30]] * 2
        text = group.call(Policy.text, [1, 2])
        assert ray.get(elsewhere.remote([text])) == text.get_results() == "xx"
        assert ray.get(ray.remote(num_cpus=0)(lambda g: g.call("count", [1, 2]).get()).remote(group)) == 2
        with pytest.raises(ValueError, match="3 rows of batch don't divide"):
            group.call(Policy.train, Batch("abc"))
        assert group.call(Policy.save, "x").get_results() == (0, "x")


@pytest.mark.hostile
def test_a_class_that_only_workers_can_import_says_how_it_is_called(cluster, tmp_path):
    (tmp_path / "far_declared.py").write_text(FAR)
    variables = {"PYTHONPATH": ":".join([str(tmp_path), *sys.path])}
    with RayWorkerGroup(cluster, "far_declared.Far", env_vars=variables, sharding_annotations=PAIR) as group:
        assert "far_declared" not in sys.modules
        assert group.call("double", [1, 2]).get_results() == [2, 4]
        assert group.run_all_workers_single_data("double", [1]).get_results() == [[2]] * 2
        with pytest.raises(ValueError, match=r"Far\.double: 1 rows of rows don't divide"):
            group.call("double", [1])
        with pytest.raises(TypeError, match=r"shortest, which joins .*Far\.shortest, can't be imported here"):
            group.call("shortest", [1, 2])


@pytest.mark.hostile
def test_a_call_that_is_sent_again_gives_the_one_value(local_ray, tmp_path):
    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster,
            Stoic,
            sharding_annotations=NamedSharding([1, 0], ["dp"]),
            idempotent_methods=("die_once",),
            restart_on_failure=True,
            max_restarts=1,
        ) as group,
    ):
        future = group.call(Stoic.die_once, [1, 2], str(tmp_path / "marker"))
        values = future.get_results()
        assert [row for _, row in values] == [1, 2]
        assert values[0][0] == 1
        assert future.get_results() == values
        failed = group.call(Stoic.fail_on, [1, 2, 3], 0)
        with pytest.raises(WorkerFailureError, match="told to"):
            failed.get_results()
        fine, error = failed.get_results(return_exceptions=True)
        assert fine == [1, 2]
        assert (error.rank, error.method) == (0, "fail_on")
