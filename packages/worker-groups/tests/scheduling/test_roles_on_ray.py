"""Roles on three nodes with made-up GPUs: processes and devices of each strategy, deaths, pings, ends."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from patience import PATIENCE_S, eventually, is_running

from raycrew.cluster_core import RayVirtualCluster
from raycrew.worker_groups.scheduling import (
    EngineCallError,
    Job,
    RayScheduler,
    SchedulingSpec,
    SchedulingStrategy,
    WorkerCreationError,
    WorkerFailedError,
    WorkerTimeoutError,
)

ECHO, MASK = "engines.Echo", "CUDA_VISIBLE_DEVICES"
ONE_GPU = SchedulingSpec(cpu=1, gpu=1)


@pytest.fixture
def scheduler(ray_nodes):
    with RayScheduler(startup_timeout_s=60, call_timeout_s=30) as made:
        yield made


def with_echo(scheduler, ids):
    """Ids of workers, each with an engine; gives for each: pid, node, devices."""

    async def all_at_once():
        await asyncio.gather(*(scheduler.async_create_engine(one, ECHO) for one in ids))
        places = await asyncio.gather(*(scheduler.async_call_engine(one, "where") for one in ids))
        masks = await asyncio.gather(*(scheduler.async_call_engine(one, "env", None, MASK) for one in ids))
        return [(place[2], place[3], mask[0]) for place, mask in zip(places, masks, strict=True)]

    return asyncio.run(all_at_once())


def is_all_free():
    return ray.available_resources().get("GPU") == ray.cluster_resources()["GPU"]


def test_a_shared_role_with_names_and_forks_beside_it(scheduler):
    specs = [
        SchedulingSpec(gpu=n, mem=0.1 * n, env_vars={"RAYCREW_TEST_OWN": name}, port_names=["http"])
        for n, name in ((1, "a"), (2, "b"))
    ]
    actors = scheduler.create_workers(Job("actor", 2, specs))
    own = with_echo(scheduler, actors)
    assert [scheduler.call_engine(one, "env", None, "RAYCREW_TEST_OWN") for one in actors] == [["a"], ["b"]]
    assert scheduler.call_engine(actors[0], "is_main_thread") is True
    assert [scheduler.call_engine(actors[0], way, None, 5) for way in ("later", "future", "ref")] == [5] * 3
    assert [len(mask.split(",")) for *_, mask in own] == [1, 2]
    assert len({(node, device) for _, node, mask in own for device in mask.split(",")}) == 3

    names = with_echo(
        scheduler,
        scheduler.create_workers(Job("ref", 2, [ONE_GPU], SchedulingStrategy("colocation", "actor"))),
    )
    assert names == own, "a second name has no processes of its own"
    forks = with_echo(scheduler, scheduler.fork_workers("reward", "actor"))
    assert [place[1:] for place in forks] == [place[1:] for place in own], "the same nodes and devices"
    again = with_echo(scheduler, scheduler.fork_workers("judge", "reward"))
    assert [place[1:] for place in again] == [place[1:] for place in own], "of a fork, too"
    forks += again
    assert len({pid for pid, *_ in own + forks}) == 6
    assert not is_all_free()

    workers = [one for role in ("actor", "reward") for one in scheduler.get_workers(role)]
    assert len({port for one in workers for port in one.worker_ports}) == 8
    assert workers[0].named_ports["http"] == workers[0].worker_ports[0]
    assert scheduler.delete_workers() is True
    assert not any(is_running(pid) for pid, *_ in own + forks)
    eventually(is_all_free, "all devices are free")


def test_a_ping_answers_during_a_call_and_an_end_does_not_wait_for_it(scheduler):
    (one,) = scheduler.create_workers(Job("actor", 1))
    ((pid, *_),) = with_echo(scheduler, [one])
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(scheduler.call_engine, one, "nap", None, 60, timeout_s=90)
        eventually(lambda: scheduler.ping(one, PATIENCE_S) == "busy", "it naps")
        assert scheduler.ping(one, PATIENCE_S).method == "call"
        with pytest.raises(WorkerTimeoutError):
            scheduler.call_engine(one, "say", timeout_s=0.1)
        assert scheduler.delete_workers("actor", timeout=0.5) is False
        assert not is_running(pid)
        assert isinstance(call.exception(), WorkerFailedError)


def test_a_worker_that_died_is_told_of_with_its_last_words(scheduler):
    ids = scheduler.create_workers(Job("actor", 2))
    with_echo(scheduler, ids)
    with pytest.raises(EngineCallError, match="KeyError"):
        scheduler.call_engine(ids[1], "oops")
    with pytest.raises(EngineCallError, match="say failed: an argument can't be sent"):
        scheduler.call_engine(ids[1], "say", None, threading.Lock())
    with pytest.raises(EngineCallError, match="SystemExit: enough"):
        scheduler.call_engine(ids[1], "leave")
    for method in ("one_by_one", "one_by_one_later"):
        with pytest.raises(EngineCallError, match="return a list"):
            scheduler.call_engine(ids[1], method)
    with pytest.raises(EngineCallError, match="closed: it raised SchedulerClosedError"):
        scheduler.call_engine(ids[1], "closed")
    with pytest.raises(WorkerFailedError, match="actor/1: die") as caught:
        scheduler.call_engine(ids[1], "die")
    assert "the last words" in caught.value.log_tail
    eventually(lambda: scheduler.ping(ids[1], PATIENCE_S) == "dead", "it is seen to be dead")
    with pytest.raises(WorkerFailedError, match="actor/1 has died: rank 1 of 'actor'") as caught:
        scheduler.get_workers("actor")
    assert "the last words" in caught.value.log_tail
    assert scheduler.call_engine(ids[0], "say", None, 1)[1] == (1,)
    scheduler.delete_workers("actor")


@pytest.mark.long
def test_separate_workers_have_placements_and_resources_of_their_own(scheduler):
    specs = [ONE_GPU, SchedulingSpec(cpu=2, gpu=2)]
    ids = scheduler.create_workers(Job("actor", 2, specs, SchedulingStrategy("separate")))
    places = with_echo(scheduler, ids)
    assert [len(mask.split(",")) for *_, mask in places] == [1, 2]
    forks = with_echo(scheduler, scheduler.fork_workers("ref", "actor"))
    assert [place[1:] for place in forks] == [place[1:] for place in places]


def test_deferred_workers_leave_bundles_on_several_nodes_to_their_engines(scheduler):
    spec = SchedulingSpec(cpu=6, gpu=6)
    (one,) = scheduler.create_workers(Job("rollout", 1, [spec], SchedulingStrategy("deferred")))
    scheduler.create_engine(one, "engines.Spawning")
    count, nodes = scheduler.call_engine(one, "places")
    assert (count, len(set(nodes))) == (6, 2)
    scheduler.delete_workers()
    eventually(is_all_free, "all devices are free")


def test_a_role_of_which_one_worker_fails_is_not_there_at_all(scheduler):
    specs = [ONE_GPU, SchedulingSpec(gpu=5)]
    for strategy in ("shared", "separate"):
        with pytest.raises(WorkerCreationError, match="actor"):
            scheduler.create_workers(Job("actor", 2, specs, SchedulingStrategy(strategy)))
        eventually(is_all_free, "all devices are free")


@pytest.mark.long
def test_a_role_of_which_one_worker_is_late_is_not_there_at_all(scheduler):
    specs = [SchedulingSpec(), SchedulingSpec(cmd=["false"])]
    job = Job("actor", 2, specs, SchedulingStrategy("separate"))
    with pytest.raises(WorkerTimeoutError, match="in time"):
        scheduler.create_workers(job, timeout_s=10)
    eventually(is_all_free, "all devices are free")


@pytest.mark.long
def test_roles_take_the_free_bundles_of_a_cluster(ray_nodes):
    with RayVirtualCluster([2, 2]) as cluster, RayScheduler(cluster, call_timeout_s=30) as scheduler:
        actors = with_echo(scheduler, scheduler.create_workers(Job("actor", 3, [ONE_GPU])))
        with pytest.raises(WorkerCreationError, match="3 of 4"):
            scheduler.create_workers(Job("critic", 2, [ONE_GPU]))
        strategy = SchedulingStrategy("separation", "actor")
        others = with_echo(scheduler, scheduler.create_workers(Job("critic", 1, [ONE_GPU], strategy)))
        assert len({place[1:] for place in actors + others}) == 4
        scheduler.delete_workers()
        assert cluster.holders() == {}
