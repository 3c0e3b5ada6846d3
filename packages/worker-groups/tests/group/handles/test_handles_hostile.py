"""Handles of groups, used as nobody should: no wrong result, no call sent twice, nobody waits for ever."""

import asyncio
import contextlib
import os
import pickle
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from forking import assert_ends_well
from handled_workers import Rollout
from patience import PATIENCE_S, eventually
from ray import cloudpickle
from ray.exceptions import RayError

from raycrew.cluster_core import RayVirtualCluster
from raycrew.cluster_core.testing import connected
from raycrew.worker_groups import (
    RayWorkerGroup,
    WorkerFailureError,
    WorkerGroupClosedError,
    WorkerGroupError,
)

pytestmark = pytest.mark.hostile


def right(token):
    return [(token, 0), (token, 1)]


def end(group, rank):
    """A rank is dead, and known to be."""
    os.kill(group.on([rank]).call("pid").get_results(timeout=PATIENCE_S)[0], signal.SIGKILL)
    eventually(lambda: group.get_worker_status(5)[rank] == "dead", "it is dead")


def ran_twice(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith("twice-")]


@pytest.mark.parametrize("restarts", [1, pytest.param(3, marks=pytest.mark.long)])
def test_threads_share_a_handle_while_ranks_are_replaced(cluster, tmp_path, restarts):
    over = threading.Event()
    with RayWorkerGroup(cluster, Rollout) as group, ThreadPoolExecutor(8) as threads:
        handle = group.handle()

        def use(thread):
            n_right = number = 0
            tries = 100  # once all ranks are there again
            while tries and (n_right < 2 or not over.is_set()):
                number, tries = number + 1, tries - over.is_set()
                token = f"{thread}.{number}"
                with contextlib.suppress(WorkerFailureError):
                    assert handle.call("mark", str(tmp_path), token).get_results(PATIENCE_S) == right(token)
                    n_right += 1
            return number

        used = [threads.submit(use, thread) for thread in range(8)]
        try:
            for restart in range(restarts):
                end(group, restart % 2)
                assert group.restart_failed_workers() == [restart % 2]
        finally:
            over.set()
        assert sum(each.result(2 * PATIENCE_S) for each in used) >= 16
        assert handle.generation == group.generation == restarts
    assert ran_twice(tmp_path) == []


def test_tasks_of_which_half_are_cancelled_leave_the_others_their_results(cluster, tmp_path):
    gate = tmp_path / "gate"

    async def use(handle):
        async def one(number):
            return await handle.call("mark", str(tmp_path), f"{number}", str(gate))

        tasks = [asyncio.create_task(one(number)) for number in range(24)]
        await asyncio.sleep(0.3)  # some run, most wait
        for task in tasks[::2]:
            task.cancel()
        gate.touch()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)

    with RayWorkerGroup(cluster, Rollout) as group:
        found = asyncio.run(use(group.handle()))
        assert all(isinstance(each, asyncio.CancelledError) for each in found[::2])
        assert found[1::2] == [right(f"{number}") for number in range(1, 24, 2)]
        assert group.call("mark", str(tmp_path), "after").get_results(PATIENCE_S) == right("after")
    assert ran_twice(tmp_path) == []


def test_a_handle_from_long_ago_calls_the_workers_of_today(cluster, tmp_path):
    with RayWorkerGroup(cluster, Rollout) as group:
        pickled = cloudpickle.dumps(group.handle())
        for rank in (1, 0):
            end(group, rank)
            assert group.restart_failed_workers() == [rank]
        late, refreshed = pickle.loads(pickled), pickle.loads(pickled)
        assert late.generation == 0
        with pytest.raises(WorkerFailureError) as failed:
            late.call("mark", str(tmp_path), "late").get_results(PATIENCE_S)
        assert "generation 2 from now on" in failed.value.__notes__[0]
        assert refreshed.refresh() == 2
        for handle, token in ((late, "again"), (refreshed, "refreshed")):
            assert handle.call("mark", str(tmp_path), token).get_results(PATIENCE_S) == right(token)
    assert ran_twice(tmp_path) == []
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("late")]


@pytest.mark.long  # in short: test_handles
def test_a_group_that_is_shut_down_leaves_no_handle_waiting(cluster, tmp_path):
    with ThreadPoolExecutor(2) as threads:
        group = RayWorkerGroup(cluster, Rollout)
        handle = group.handle()
        pickled = cloudpickle.dumps(handle)
        running = handle.call("mark", str(tmp_path), "running", str(tmp_path / "never"))
        waiting = [threads.submit(running.get_results, PATIENCE_S), threads.submit(running.wait, PATIENCE_S)]
        eventually(lambda: len(list(tmp_path.iterdir())) == 2, "it runs")
        group.shutdown(force=True)
        with pytest.raises(WorkerFailureError):
            waiting[0].result(PATIENCE_S)
        assert waiting[1].result(PATIENCE_S)
        for old in (handle, pickle.loads(pickled)):
            with pytest.raises((WorkerFailureError, WorkerGroupClosedError)):
                old.call("pid").get_results(PATIENCE_S)
            with pytest.raises(WorkerGroupClosedError, match="was shut down"):
                old.refresh()


class Stranger:
    """Is called as somebody else was, and answers the same questions."""

    def newer_than(self, generation):
        return self


@pytest.mark.long  # in short: test_routes
def test_an_actor_of_others_under_the_name_of_the_one_that_knows_is_not_believed(cluster, tmp_path):
    with RayWorkerGroup(cluster, Rollout) as group:
        handle = group.handle()
        address = handle._route._contact.address
        ray.kill(ray.get_actor(address.actor, address.namespace))

        def took_the_name():
            with contextlib.suppress(ValueError):  # Ray still holds it
                options = {"num_cpus": 0, "name": address.actor, "namespace": address.namespace}
                return ray.remote(**options)(Stranger).remote()

        strangers = []
        eventually(lambda: strangers.append(took_the_name()) or strangers[-1], "somebody has it")
        with pytest.raises(WorkerGroupError, match="is another actor now"):
            handle.refresh()
        end(group, 1)
        with pytest.raises(WorkerFailureError) as failed:
            handle.call("mark", str(tmp_path), "one").get_results(PATIENCE_S)
        assert "is another actor now" in failed.value.__notes__[0]
        assert group.restart_failed_workers() == [1]
        assert group.handle().call("mark", str(tmp_path), "two").get_results(PATIENCE_S) == right("two")
    assert ran_twice(tmp_path) == []


FORKING = """
    import os, ray, sys
    from raycrew.cluster_core import RayVirtualCluster
    from raycrew.worker_groups import RayWorkerGroup, WorkerGroupClosedError
    from handled_workers import Rollout
    ray.init(address=sys.argv[1], log_to_driver=False)
    with RayVirtualCluster([1], use_gpus=False) as cluster, RayWorkerGroup(cluster, Rollout) as group:
        handle = group.handle()
        future = handle.call("scaled", 1)
        child = os.fork()
        if child == 0:
            code = 0
            handle._route._misses_some = True
            for use in (lambda: handle.call("pid"), handle.refresh, lambda: handle.ranks, future.get_results):
                try:
                    use()
                    code = 3
                except WorkerGroupClosedError:
                    pass
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert future.get_results(timeout=60) == [1]
        assert handle.call("scaled", 2).get_results(timeout=60) == [2]
    print("end", flush=True)
"""


@pytest.mark.long  # in short: test_routes
def test_a_forked_child_calls_nobody(local_ray):
    assert_ends_well(FORKING, local_ray)


@pytest.mark.long
def test_a_handle_of_another_connection_calls_nobody_in_this_one(
    local_ray_session, ray_nodes_session, tmp_path
):
    with (
        connected(local_ray_session),
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Rollout) as group,
    ):
        handle = group.handle()
        pickled, future = cloudpickle.dumps(handle), handle.call("pid")
        assert future.wait(PATIENCE_S)
    ray.shutdown()
    for use in (lambda: pickle.loads(pickled).call("pid"), lambda: handle.call("pid"), future.get_results):
        with pytest.raises((WorkerGroupError, RayError)):
            use()
    assert not ray.is_initialized()
    with (
        connected(ray_nodes_session),
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Rollout) as group,
    ):
        for use in (lambda: handle.call("mark", str(tmp_path), "old"), handle.refresh):
            with pytest.raises(WorkerGroupClosedError):
                use()
        with pytest.raises(WorkerGroupClosedError):
            future.get_results()
        now = group.handle().call("mark", str(tmp_path), "now")
        assert now.get_results(PATIENCE_S) == right("now")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["now-0", "now-1"]
