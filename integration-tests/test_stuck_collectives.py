"""A collective operation that not all ranks come to, over two nodes."""

import os
import signal
import time

import pytest
from summing_workers import Summing

from raycrew.cluster_core import RayVirtualCluster
from raycrew.cluster_core.testing import connected, simulated_nodes
from raycrew.worker_groups import RayWorkerGroup, WorkerFailureError

WAIT_S = 120


@pytest.fixture
def group():
    with (
        simulated_nodes([{"num_cpus": 1}] * 2) as nodes,
        connected(nodes.address),
        RayVirtualCluster([1, 1], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Summing) as made,
    ):
        assert len({info.node_id for info in made.ranks}) == 2
        yield made


def await_stuck(group, reasons):
    deadline = time.monotonic() + WAIT_S
    found = ask(group)
    while {rank: stuck.reason for rank, stuck in found.items()} != reasons:
        assert time.monotonic() < deadline, f"found {found}, not {reasons}"
        time.sleep(0.1)
        found = ask(group)
    return found


def ask(group):
    return group.detect_stuck_workers(threshold_s=3, timeout=10)


@pytest.mark.long  # in short, without torch: test_stuck_workers_are_found_and_those_that_go_on_are_not
@pytest.mark.hostile
def test_who_waits_for_ranks_that_do_not_come_is_found_and_goes_on_when_they_do(group):
    pids = group.call("pid").get_results(timeout=WAIT_S)
    alone = group.on(ranks=[0]).call("sum", 1.0)
    stuck = await_stuck(group, {0: "no_progress"})[0]
    assert (stuck.method, stuck.pid, stuck.node_id) == ("sum", pids[0], group.ranks[0].node_id)
    waiting, free = group.get_worker_status(timeout=10).values()
    assert (waiting, waiting.method, free) == ("busy", "sum", "ready")
    assert all(usage.private_bytes > 2**20 for usage in group.get_resource_usage(timeout=10).values())
    assert group.on(ranks=[1]).call("sum", 2.0).get_results(timeout=WAIT_S) == [3.0]
    assert alone.get_results(timeout=WAIT_S) == [3.0]
    assert group.detect_stuck_workers(threshold_s=30, timeout=10) == {}

    os.kill(pids[1], signal.SIGSTOP)
    never = group.call("sum", 1.0)
    await_stuck(group, {0: "no_progress", 1: "stopped"})
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerFailureError, match=r"rank 1 .* died") as failed:
        never.get_results(timeout=WAIT_S)
    assert failed.value.rank == 1, "the culprit comes first"
    port = group.master_port
    assert group.restart_failed_workers() == [1]
    assert group.master_port != port
    assert group.call("sum", 1.0).get_results(timeout=WAIT_S) == [2.0, 2.0]
