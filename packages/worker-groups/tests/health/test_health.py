"""How workers of a group on Ray are seen to be while they are busy, stuck, stopped or dead."""

import contextlib
import os
import signal

import pytest
from patience import PATIENCE_S, eventually
from workers import Patient

from raycrew.worker_groups import RayWorkerGroup, ResourceUsage, WorkerMemoryError


@pytest.fixture
def group(cluster):
    with RayWorkerGroup(cluster, Patient) as made:
        yield made


def test_a_busy_worker_is_told_of_at_once(group, tmp_path):
    gate = tmp_path / "gate"
    first = group.call("pid").get_results()
    sitting = group.on(ranks=[0]).call("sit_until", str(gate))
    eventually(lambda: group.get_worker_status(5)[0].method == "sit_until", "the call is told")
    eventually(lambda: group.get_worker_status(5)[1] == "ready", "the other has answered")
    busy, ready = group.get_worker_status(PATIENCE_S).values()
    assert (busy, busy.method, len(busy.calls)) == ("busy", "sit_until", 1)
    assert (ready, ready.method, ready.sequence, ready.calls) == ("ready", None, None, ())
    assert busy.sequence == 3  # after __init__ and pid
    assert 0 <= busy.silent_s == busy.running_s < PATIENCE_S
    assert all(status.private_bytes > 2**20 and status.beat_age_s < PATIENCE_S for status in (busy, ready))
    eventually(
        lambda: all(usage.cpu is not None for usage in group.get_resource_usage(5).values()),
        "two looks have been taken",
    )
    usage = group.get_resource_usage(PATIENCE_S)[0]
    assert usage.resident_bytes > usage.private_bytes > 2**20
    assert usage.n_processes == 1
    gate.touch()
    sitting.get_results(timeout=PATIENCE_S)
    assert group.on(ranks=[0]).call("tick_in_a_child").get_results(timeout=PATIENCE_S) == [(0, True)]
    os.kill(first[1], signal.SIGKILL)
    eventually(lambda: group.get_worker_status(5)[1] == "dead", "the dead one is told")
    eventually(lambda: group.get_resource_usage(5)[1] == ResourceUsage(), "nothing is used any more")
    assert 1 not in group.detect_stuck_workers(0.1, PATIENCE_S)
    assert group.restart_failed_workers() == [1]
    assert set(group.get_worker_status(PATIENCE_S).values()) == {"ready"}


@pytest.mark.hostile
def test_stuck_workers_are_found_and_those_that_go_on_are_not(group, tmp_path):
    gate, second_gate, fifo = tmp_path / "gate", tmp_path / "second", tmp_path / "fifo"
    pids = group.call("pid").get_results()
    going = group.on(ranks=[0]).call("go_on_until", str(gate))
    eventually(lambda: group.get_worker_status(5)[0].method == "go_on_until", "it goes on")
    sitting = group.on(ranks=[1]).call("sit_until", str(second_gate))
    stuck = {}

    def is_found():
        stuck.update(group.detect_stuck_workers(4))
        return 1 in stuck

    eventually(is_found, "it sits in one call")
    assert stuck.keys() == {1}, "the other one has been at work for longer"
    found = stuck[1]
    assert (found.rank, found.reason, found.method, found.sequence) == (1, "no_progress", "sit_until", 3)
    assert found.silent_s == found.running_s > 4
    assert (found.pid, found.node_id) == (pids[1], group.ranks[1].node_id)
    assert "rank 1" in str(found)
    goes_on = group.get_worker_status(PATIENCE_S)[0]
    assert goes_on.running_s > max(4, goes_on.silent_s)
    gate.touch()
    second_gate.touch()
    going.get_results(timeout=PATIENCE_S)
    sitting.get_results(timeout=PATIENCE_S)

    os.mkfifo(fifo)
    holding = group.on(ranks=[0]).call("hold_the_lock_until", str(fifo))
    with fifo.open("wb", buffering=0) as pipe, resumed(pids[1]):
        os.kill(pids[1], signal.SIGSTOP)
        eventually(lambda: reasons(group) == {0: "gil_held", 1: "stopped"}, "both are found")
        held, stopped = group.get_worker_status(PATIENCE_S).values()
        assert (held, held.method, stopped, stopped.method) == ("busy", "hold_the_lock_until", "busy", None)
        pipe.write(b"!")
        holding.get_results(timeout=PATIENCE_S)
    eventually(lambda: not group.detect_stuck_workers(PATIENCE_S), "all go on")
    assert set(group.get_worker_status(PATIENCE_S).values()) == {"ready"}


def reasons(group):
    return {rank: stuck.reason for rank, stuck in group.detect_stuck_workers(0.1).items()}


@contextlib.contextmanager
def resumed(pid):
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.hostile
def test_who_has_more_private_memory_than_the_limit_is_ended_and_the_error_says_so(cluster):
    limit = 300 * 10**6
    with RayWorkerGroup(cluster, Patient, memory_limit="300MB", idempotent_methods=["pid"]) as group:
        group.call("share", 400 * 2**20).get_results(timeout=PATIENCE_S)
        growing = group.on(ranks=[1]).call("grow")
        with pytest.raises(WorkerMemoryError, match=f"rank 1 .*during grow.*limit is {limit:,}") as caught:
            growing.get_results(timeout=PATIENCE_S)
        error = caught.value
        assert (error.rank, error.limit_bytes, error.method) == (1, limit, "grow")
        assert limit < error.measured_bytes
        assert group.get_worker_status(PATIENCE_S)[0] == "ready", "shared memory does not count"
        assert group.restart_failed_workers() == [1]
        with pytest.raises(WorkerMemoryError):
            group.on(ranks=[1]).call("grow").get_results(timeout=PATIENCE_S)
