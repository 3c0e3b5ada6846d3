"""A timeline of workers on Ray: their own times, without a message per call."""

import os
import signal
from collections import Counter
from types import SimpleNamespace

import pytest
import ray
from patience import PATIENCE_S, eventually
from timed_workers import Timed

from raycrew.cluster_core import RayVirtualCluster
from raycrew.cluster_core.testing import connected, simulated_nodes
from raycrew.worker_groups import RayWorkerGroup, WorkerFailureError, fan_out, timeline
from raycrew.worker_groups._health.observers import observed
from raycrew.worker_groups._health.timeline import metrics, questions, recorder


def events(run, **wanted):
    found = [event for event in run.trace()["traceEvents"] if event["ph"] == "X"]
    return [e for e in found if all(e.get(key, e["args"].get(key)) == value for key, value in wanted.items())]


@pytest.fixture
def group(cluster, monkeypatch):
    for module in (questions, recorder):  # on a busy machine nodes may take their time to answer
        monkeypatch.setattr(module, "LOOK_WITHIN_S", PATIENCE_S)
    with RayWorkerGroup(
        cluster, Timed, name_prefix="timed", enable_load_balancing=True, idempotent_methods=["slow_on"]
    ) as made:
        yield made


def let_rank_1_be_slower(group, path):
    """Rank 0 takes its next call once it is over with the one before."""
    slow = group.call("slow_on", 1, str(path))
    group.on(ranks=[0]).call("stream", 1).get_results()
    path.touch()
    slow.get_results()


def test_workers_tell_when_their_calls_ran(group, tmp_path, monkeypatch):
    counts = Counter()

    def counter(name):
        def count(value, labels):
            counts[name, *sorted(labels.values())] += value

        return SimpleNamespace(inc=count, observe=lambda *_: None, set=lambda *_: None)

    monkeypatch.setattr(metrics, "_made", counter)
    group.call("clock").get_results()
    with timeline(metrics=True) as run:
        first = group.call("clock").get_results()
        for each in range(5):
            let_rank_1_be_slower(group, tmp_path / str(each))
        list(group.call("stream", 3).as_completed())
        assert len(list(group.balancer.map("slow_on", [-1] * 4, common_kwargs={"path": ""}))) == 4
        handle = group.handle()
        handle.call("clock").get_results()
        future = group.call("clock")
        assert len(fan_out(abs, range(20), progress=False)) == 20
        pids = group.call("slow_on", -1, "").get_results()
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(WorkerFailureError):
            group.on(ranks=[1]).call("stream", 1).get_results(timeout=PATIENCE_S)
        eventually(lambda: group.restart_failed_workers() == [1], "the dead worker is replaced")
        group.call("clock").get_results()
    assert observed.by is None
    assert len(future) == 2
    statistics = run.statistics()
    assert run.dropped == 0
    assert statistics.untold == 1, "of the rank that was killed"
    assert len(events(run, name="clock", kind="running")) == 2 * 4
    assert len(events(run, name="stream", kind="running")) == 2 + 5
    assert len(events(run, name="slow_on", kind="call", **{"for": "balancer"})) == 4
    (slowest,) = (one for one in statistics.slowest if one.method == "slow_on")
    assert (slowest.rank, slowest.calls) == (1, 6)
    assert slowest.times >= 5
    waited_us = sum(event["dur"] for event in events(run, name="slow_on", kind="waiting"))
    assert slowest.lost_s > 0
    assert slowest.lost_s == pytest.approx(waited_us / 1e6)
    assert [event["args"]["generation"] for event in events(run, kind="restart")] == [1]
    assert counts["restarts", "timed"] == 1
    assert counts["calls", "clock", "ok", "timed"] == 3
    assert counts["calls", "clock", "timed", "untold"] == 1, "nobody has taken the results of one"
    assert counts["calls", "failed", "stream", "timed"] == 1
    assert sum(n for (name, *_), n in counts.items() if name == "fan_out_items") == 20
    assert counts["fan_out_bytes", "sent"] > 20 < counts["fan_out_bytes", "received"]
    batches = [event for event in events(run, kind="running") if event["name"].endswith("abs")]
    assert sum(event["args"]["items"] for event in batches) == 20
    began = min(begin for begin, _ in first)
    (call,) = (c for c in run._kept.calls() if c.method == "clock" and c.sent <= began <= c.taken)
    for rank, (begin, end) in enumerate(first):
        assert call.running()[rank][0] <= begin <= end <= call.running()[rank][1], "one clock on one node"


def test_calls_of_another_process_are_drawn_as_they_ran(group):
    import ray

    @ray.remote(num_cpus=0)
    def call(handle):
        return handle.call("clock").get_results(timeout=PATIENCE_S)

    with timeline() as run:
        group.call("slow_on", -1, "").get_results()
        ray.get(call.remote(group.handle()), timeout=PATIENCE_S)
    assert len(events(run, name="clock", kind="running")) == 2
    assert not events(run, name="clock", kind="call")


def test_calls_that_are_awaited_or_taken_by_ray_alone_are_there_too(group):
    import asyncio

    import ray

    async def call():
        return await group.call("slow_on", -1, "")

    with timeline() as run:
        asyncio.run(call())
        ray.get(group.run_all_workers_single_data("clock"))
    assert len(events(run, name="slow_on", kind="running")) == 2
    (awaited,) = events(run, name="slow_on", kind="call")
    assert awaited["args"]["outcome"] == "ok"
    assert len(events(run, name="clock", kind="running")) == 2


def counted_open(monkeypatch):
    """How many calls are open, each time that somebody looks."""
    n_open = []
    gauge = SimpleNamespace(set=lambda n, _: n_open.append(n), inc=lambda *_: None, observe=lambda *_: None)
    monkeypatch.setattr(metrics, "_made", lambda _: gauge)
    return n_open


def test_a_call_of_a_worker_that_was_killed_is_not_open_for_good(group, tmp_path, monkeypatch):
    n_open = counted_open(monkeypatch)
    with timeline(metrics=True, open_telemetry=False) as run:
        pid = group.call("slow_on", -1, "").get_results()[1]
        lost = group.on(ranks=[1]).call("slow_on", 1, str(tmp_path / "never"))
        eventually(lambda: run.statistics() and n_open[-1:] == [1], "it is open")
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: run.statistics() and n_open[-1] == 0, "nobody is in it any more")
    del lost


@pytest.mark.long
@pytest.mark.hostile
def test_nor_is_one_of_a_worker_whose_node_has_died(tmp_path, monkeypatch):
    n_open = counted_open(monkeypatch)
    with (
        simulated_nodes([{"num_cpus": 2}] * 2) as nodes,
        connected(nodes.address),
        RayVirtualCluster([1, 1], use_gpus=False, placement_group_strategy="SPREAD") as cluster,
        RayWorkerGroup(cluster, Timed, name_prefix="lost") as group,
        timeline(metrics=True, open_telemetry=False) as run,
    ):
        head = ray.get_runtime_context().get_node_id()
        [rank] = [info.rank for info in group.ranks if info.node_id != head]
        [node] = [n for n in nodes.list_all_nodes() if n.node_id != head]
        lost = group.on(ranks=[rank]).call("slow_on", rank, str(tmp_path / "never"))
        eventually(lambda: run.statistics() and n_open[-1:] == [1], "it is open")
        nodes.remove_node(node, allow_graceful=False)
        eventually(lambda: run.statistics() and n_open[-1] == 0, "nobody is in it any more")
        del lost
