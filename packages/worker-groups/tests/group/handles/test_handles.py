import asyncio
import contextlib
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
from handled_workers import Caller, Meeting, Rollout
from patience import eventually
from ray import cloudpickle

from raycrew.cluster_core import RayVirtualCluster
from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import (
    GroupHandle,
    NamedSharding,
    RayWorkerBuilder,
    RayWorkerGroup,
    UnknownMethodError,
    WorkerFailureError,
    WorkerGroupClosedError,
    WorkerGroupError,
)
from raycrew.worker_groups._group.handles import directory
from raycrew.worker_groups._ray import find_actor, own_namespace
from raycrew.worker_groups.testing import InProcessGroup

DP = NamedSharding([0, 1], ["dp"])


def caller(handle, **options):
    return ray.remote(num_cpus=0, **options)(Caller).remote(handle)


def answer(ref):
    return ray.get(ref, timeout=200)


def ask_the_copy(group):
    try:
        group.handle()
    except WorkerGroupError as error:
        return str(error)
    return "done"


def told(handle):
    with contextlib.suppress(WorkerGroupError):
        return handle.refresh()


def test_an_actor_calls_a_group_that_it_does_not_own(local_ray, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "a-very-secret-token")
    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster,
            RayWorkerBuilder(Rollout, "an-argument-of-init"),
            sharding_annotations=DP,
            secrets=["API_TOKEN"],
            env_vars={"COLOUR": "a-colour"},
            enable_load_balancing=True,
            scale=10,
        ) as group,
    ):
        handle = group.handle()
        pickled = cloudpickle.dumps(handle)
        for hidden in (b"a-very-secret-token", b"an-argument-of-init", b"a-colour"):
            assert hidden not in pickled
        for power in ("shutdown", "ashutdown", "restart_failed_workers", "renew_rendezvous", "workers"):
            assert not hasattr(handle, power)
        assert not hasattr(GroupHandle, "__enter__")

        seen = answer(caller(handle).use.remote())
        assert seen["pids"] == group.call("pid").get_results()
        assert seen["secret"] == ["a-very-secret-token"] * 2
        assert seen["declared"] == [2, 4, 6, 8]
        assert seen["stream"] == [(0, (0, 0)), (0, (0, 1)), (1, (1, 0)), (1, (1, 1))]
        assert (seen["one"], seen["named"], seen["balanced"]) == ([40], [10, 20], [10, 20, 30])
        assert seen["facts"] == (group.ranks, 2, 0, [[0], [1]])
        assert seen["text"] == "GroupHandle('Rollout', 2 workers, generation 0)"

        assert answer(caller(handle, max_concurrency=1).wait.remote(3)) == [30, 30]
        rank, name, message, notes = answer(caller(handle).failure.remote("fail"))
        assert (rank, name, notes) == (0, "Rollout", [])
        assert "fail raised ValueError: as it was told to" in message.replace("2 workers", "")
        with pytest.raises(UnknownMethodError, match="no method 'scale'"):
            handle.call("scale", 1)
        with pytest.raises(AttributeError, match=r"call\('scaled', …\) calls that method"):
            handle.scaled(1)
        said = answer(ray.remote(num_cpus=0)(ask_the_copy).remote(group))
        assert "handle() of worker group 'Rollout' is for the process that made it" in said


@pytest.mark.hostile
def test_a_handle_follows_a_restart_and_sends_nothing_twice(local_ray, tmp_path):
    ran, items = tmp_path / "ran", tmp_path / "items"
    ran.mkdir()
    items.mkdir()
    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster, Rollout, enable_load_balancing=True, idempotent_methods=("once",), ports_per_worker=0
        ) as group,
    ):
        first, idle = caller(group.handle()), caller(group.handle())
        assert answer(first.results.remote("pid")) == answer(idle.results.remote("pid"))

        rank, _, message, notes = answer(first.failure.remote("run", str(ran), 1))
        assert (rank, "died during run" in message) == (1, True)
        assert "the group has no newer workers yet" in notes[0]
        assert group.restart_failed_workers() == [1]
        pids = group.call("pid").get_results()
        assert answer(first.results.remote("pid")) == pids  # it has asked before it called

        _, _, _, notes = answer(idle.failure.remote("run", str(ran)))
        assert "generation 1 from now on; this call may have run, and was not sent again" in notes[0]
        assert answer(idle.results.remote("run", str(ran))) == [1, 1]
        marks = 2 + 1 + 2  # on both ranks, on the one that lived, on both
        eventually(lambda: len(list(ran.iterdir())) == marks, "each call has run once")

        assert [number for number, _ in answer(first.items.remote(str(items), 6))] == list(range(6))
        assert Path(items, "died").exists()
        assert len(group.restart_failed_workers()) == 1
        assert answer(idle.refresh.remote()) == 2
        assert answer(first.results.remote("pid")) == group.call("pid").get_results()

        patient = group.handle()  # which only waits for the ends of its calls
        assert patient.call("run", str(ran), 0).wait(60)
        assert group.restart_failed_workers() == [0]
        assert patient.generation == group.ranks[0].generation == 3
        again = patient.call("pid")
        assert again.wait(60) and again.get_results() == group.call("pid").get_results()

        group.shutdown()
        eventually(lambda: "was shut down" in answer(idle.is_closed.remote()), "the group's end is known")
        with pytest.raises(WorkerGroupClosedError, match="was shut down"):
            group.handle()


@pytest.mark.long  # in short: test_directory
@pytest.mark.hostile
def test_a_directory_that_is_lost_is_made_anew(local_ray, monkeypatch, tmp_path):
    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Rollout, name_prefix="policy") as group,
    ):
        handle = group.handle()
        lose_directory(handle)
        with pytest.raises(WorkerFailureError) as failed:
            handle.call("run", str(tmp_path), 0).get_results()
        assert "who the group's members are now is not known" in failed.value.__notes__[0]
        assert handle.on([1]).call("run", str(tmp_path)).get_results() == [0]  # it lives, as far as is known
        with pytest.raises(WorkerGroupError, match="nobody knows the members of 'policy'"):
            handle.refresh()
        assert group.restart_failed_workers() == [0]
        assert handle.refresh() == 1
        assert handle.call("pid").get_results() == group.call("pid").get_results()
        lose_directory(handle)
        eventually(lambda: told(group.handle()) == told(handle) == 1, "a new directory answers")
        monkeypatch.setattr(directory, "_ANSWER_S", 0)
        with pytest.raises(WorkerGroupError, match="the members of 'policy' did not answer within 0 s"):
            handle.refresh()


@pytest.mark.hostile
def test_no_call_comes_before_on_generation(cluster, tmp_path):
    gate = tmp_path / "gate"
    with RayWorkerGroup(cluster, Meeting) as group, ThreadPoolExecutor(1) as pool:
        handle = group.handle()
        busy = group.on([1]).call("wait_for", str(gate))
        renewed = pool.submit(group.renew_rendezvous)
        try:
            eventually(lambda: group.generation == 1, "the group waits for rank 1 to hear of it")
            between = handle.on([0]).call("seen").get_results(timeout=60)
        finally:
            gate.touch()
        assert (renewed.result(60), busy.get_results()) == (1, [None])
        assert between == [(0, 0)]
        assert handle.call("seen").get_results() == [(1, 1)] * 2
        assert group.renew_rendezvous() == 2
        assert handle.call("seen").get_results() == [(2, 2)] * 2


@pytest.mark.long  # in short: test_no_call_comes_before_on_generation
@pytest.mark.hostile
def test_no_copy_of_a_group_calls_before_on_generation(cluster, monkeypatch):
    with RayWorkerGroup(cluster, Meeting) as group, ThreadPoolExecutor(1) as pool:
        waits, take, copies = threading.Event(), RayWorkerGroup._take_layout, []
        await_replaced = group._life.await_replaced

        def await_and_say_so(*asked):
            waits.set()
            await_replaced(*asked)

        def copied():
            copy = pickle.loads(cloudpickle.dumps(group))
            return copy.call("seen").get_results(timeout=60)

        def take_and_be_copied(group, layout):
            take(group, layout)
            copies.append(pool.submit(copied))
            assert waits.wait(60), "it is copied within the restart"

        monkeypatch.setattr(group._life, "await_replaced", await_and_say_so)
        monkeypatch.setattr(RayWorkerGroup, "_take_layout", take_and_be_copied)
        assert group.on([0]).call("end").wait(60)
        assert group.restart_failed_workers() == [0]
        assert copies[0].result(60) == [(1, 1)] * 2, "no copy knows a worker that has not heard of it"


def lose_directory(handle):
    name = handle._route._contact.address.actor
    ray.kill(ray.get_actor(name))
    eventually(lambda: find_actor(name, own_namespace()) is None, "its name is free")


def test_a_handle_of_a_group_in_this_process():
    with InProcessGroup(
        FakeCluster([2]), Rollout, sharding_annotations=DP, enable_load_balancing=True, scale=3
    ) as group:
        handle = group.handle()
        assert handle.call(Rollout.doubled, [1, 2]).get_results() == [2, 4]
        assert list(handle.balancer.map(Rollout.scaled, [1, 2])) == [3, 6]
        assert sorted(handle.balancer.as_completed("scaled", [1, 2])) == [(0, 3), (1, 6)]
        assert handle.balancer.call(Rollout.doubled, [3]).get_results() == [[6]]  # not as it declares
        with pytest.raises(TypeError, match="as a function of its class or by name"):
            handle.balancer.map(3, [1])
        assert asyncio.run(_wait(handle)) == [3, 3]
        assert (handle.generation, group.renew_rendezvous(), handle.refresh()) == (0, 1, 1)
        with pytest.raises(TypeError, match="no handle of it can be pickled"):
            pickle.dumps(handle)
    with pytest.raises(WorkerGroupClosedError):
        handle.call("scaled", 1)


async def _wait(handle):
    return await handle.call("scaled", 1)


def test_a_group_without_a_balancer_gives_handles_without_one():
    with (
        InProcessGroup(FakeCluster([1]), Rollout) as group,
        pytest.raises(ValueError, match="enable_load_balancing=True"),
    ):
        group.handle().balancer  # noqa: B018
