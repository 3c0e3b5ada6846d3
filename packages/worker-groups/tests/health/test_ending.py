"""Workers that don't end by themselves: ended means gone from the process table, with all they started."""

import gc
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import ray
from patience import eventually, is_running, within
from unwilling import LeavesAndRaises, Moody, Unwilling

from raycrew.cluster_core import BundlesOccupiedError, RayVirtualCluster
from raycrew.cluster_core.testing import connected, simulated_nodes
from raycrew.worker_groups import RayWorkerGroup, UnknownMethodError, WorkerFailureError, WorkerGroupError
from raycrew.worker_groups._health import ending, questions, watches
from raycrew.worker_groups._start import bundles

pytestmark = pytest.mark.hostile


@pytest.fixture
def group(cluster):
    made = RayWorkerGroup(cluster, Unwilling)
    yield made
    made.shutdown(force=True)


def running(pids):
    return [pid for pid in pids if is_running(pid)]


def kill(group, rank):
    """Kill a worker, and wait until Ray tells."""
    psutil.Process(group.call("pid").get_results()[rank]).kill()
    eventually(lambda: group.get_worker_status()[rank] == "dead", "the dead worker is told")


def free(cluster):
    cluster.claim(None, "the next").release()
    return True


@pytest.mark.parametrize(
    "way",
    [
        "hang_at_exit",
        pytest.param("hang_in_del", marks=pytest.mark.long),
        pytest.param("hang_in_thread", marks=pytest.mark.long),
        "stop",
    ],
)
def test_who_does_not_end_is_killed_at_the_deadline(group, cluster, way):
    pids = group.call("pid").get_results()
    group.call(way)
    if way != "stop":
        group.call("pid").get_results()
    else:
        eventually(lambda: all(psutil.Process(p).status() == "stopped" for p in pids), "both are stopped")
    with within(30):
        assert seen_at_the_end_of(lambda: group.shutdown(timeout=2), cluster, pids) is False
    assert running(pids) == []
    assert group.unended == {}
    assert free(cluster)


def seen_at_the_end_of(shutdown, cluster, pids):
    """What a shutdown says; as long as a worker runs, nobody else may have its bundle."""
    assert len(cluster.holders()) == len(pids)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(shutdown)
        while not done.done():
            held = cluster.holders()
            assert held or not running(pids)
            with suppress(TimeoutError):
                done.exception(timeout=0.02)
        return done.result()


@pytest.mark.parametrize("force", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_workers_started_ends_with_them(group, tmp_path, force):
    assert group.call("adopts_orphans").get_results() == [0, 0]  # what a user starts has no other parent
    pids = group.call("pid").get_results()
    for started in (
        group.call("start_child"),
        group.call("start_session"),
        group.call("start_daemon", str(tmp_path), execute=True),
        group.call("start_daemon", str(tmp_path), execute=False),
    ):
        pids += started.get_results()
    assert running(pids) == pids
    assert group.shutdown(force=force)
    assert running(pids) == []


def test_what_carries_no_mark_is_remembered(group):
    pids = group.call("pid").get_results()
    group.call("forget_mark").get_results()
    orphans = group.call("start_session").get_results()
    os.kill(orphans[0], signal.SIGSTOP)
    facts = dict(enumerate(group._started.facts))
    questions.follow(list(facts.values()))  # looks at the table at once
    assert questions.ask("await_exit", facts, 0.0)
    for pid in pids:
        psutil.Process(pid).kill()
    eventually(lambda: not running(pids), "the workers are dead")
    assert group.shutdown()
    assert running(orphans) == []


def test_a_killed_rank_is_replaced_when_all_it_started_has_ended(group, tmp_path):
    pids = group.call("pid").get_results()
    daemons = group.call("start_daemon", str(tmp_path), execute=False).get_results()
    sessions = group.call("start_session").get_results()
    psutil.Process(pids[0]).kill()
    eventually(lambda: group.get_worker_status()[0] == "dead", "the dead worker is told")
    assert group.restart_failed_workers() == [0]
    assert running([daemons[0], sessions[0]]) == []
    assert running([daemons[1], sessions[1]]) == [daemons[1], sessions[1]]
    assert group.shutdown()
    assert running([daemons[1], sessions[1]]) == []


def test_a_failed_start_leaves_nothing(cluster, tmp_path):
    with pytest.raises(WorkerFailureError, match="not today"):
        RayWorkerGroup(cluster, LeavesAndRaises, folder=str(tmp_path))
    left = [int(path.name.split("-")[1]) for path in tmp_path.iterdir() if path.name[0] in "dw"]
    assert len(left) >= 2
    assert running(left) == []
    assert free(cluster)


def test_a_killed_watch_is_made_anew(group, tmp_path):
    pids = group.call("pid").get_results()
    pids += group.call("start_daemon", str(tmp_path), execute=True).get_results()
    ray.kill(watches.watch_on(group.ranks[0].node_id))
    assert group.shutdown()
    assert running(pids) == []


@pytest.mark.long  # in short: test_a_killed_watch_is_made_anew
def test_a_watch_killed_at_its_work_is_made_anew(group, tmp_path):
    pids = group.call("pid").get_results()
    group.call("hang_at_exit").get_results()
    node_id = group.ranks[0].node_id
    before = watches.watch_on(node_id)
    with ThreadPoolExecutor() as pool:
        shutdown = pool.submit(group.shutdown, timeout=10)
        eventually(lambda: group._life.state == "closing", "the shutdown has begun")
        ray.kill(before)
        assert not shutdown.result()
    assert watches.watch_on(node_id) is not before
    assert running(pids) == []


def test_four_shutdowns_at_once_return_after_the_end(group):
    pids = group.call("pid").get_results()
    group.call("hang_at_exit").get_results()
    gate = threading.Barrier(4)

    def end():
        gate.wait()
        return group.shutdown(timeout=2), running(pids)

    with ThreadPoolExecutor(4) as pool:
        assert [call.result() for call in [pool.submit(end) for _ in range(4)]] == [(False, [])] * 4


@pytest.mark.long  # in short: test_shutdown
@pytest.mark.parametrize(
    ("method", "error"), [("clean_upp", UnknownMethodError), ("start_daemon", TypeError)]
)
def test_workers_end_when_the_clean_up_can_not_be_called(group, cluster, method, error):
    pids = group.call("pid").get_results()
    with pytest.raises(error):
        group.shutdown(method)
    assert running(pids) == []
    assert free(cluster)


@pytest.mark.long  # in short: test_what_can_not_be_ended_keeps_its_bundle
def test_a_node_that_can_not_be_asked_is_told(monkeypatch, caplog):
    monkeypatch.setattr(questions, "_ANSWER_S", 2.0)
    monkeypatch.setattr(ending, "KILL_TIMEOUT_S", 2.0)
    with (
        simulated_nodes([{"num_cpus": 2}] * 2) as nodes,
        connected(nodes.address),
        RayVirtualCluster([1, 1], use_gpus=False, placement_group_strategy="SPREAD") as cluster,
    ):
        group = RayWorkerGroup(cluster, Unwilling)
        pids = group.call("pid").get_results()
        head = ray.get_runtime_context().get_node_id()
        [rank] = [info.rank for info in group.ranks if info.node_id != head]
        [node] = [n for n in nodes.list_all_nodes() if n.node_id != head]
        with stopped(node.all_processes["raylet"][0].process.pid):
            with within(60):
                assert not group.shutdown(force=True)
            assert list(group.unended) == [rank]
            assert f"rank {rank} is not known to have ended" in caplog.text
            assert running(pids) == [pids[rank]]
            with pytest.raises(BundlesOccupiedError):
                cluster.claim(None, "the next")
        monkeypatch.undo()
        assert group.shutdown(force=True)
        assert running(pids) == []
        assert group.unended == {}
        assert free(cluster)


@contextmanager
def stopped(raylet):
    """A node that does not answer: neither Ray nor the watch that has its process table."""
    watch = [child for child in psutil.Process(raylet).children() if "Watch" in child.cmdline()[0]]
    assert len(watch) == 1
    held = [raylet, watch[0].pid]
    for pid in held:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in held:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.long
def test_nodes_that_share_a_machine_and_one_that_dies(caplog, tmp_path, monkeypatch):
    with (
        simulated_nodes([{"num_cpus": 2}] * 2) as nodes,
        connected(nodes.address),
        RayVirtualCluster([1, 1], use_gpus=False, placement_group_strategy="SPREAD") as cluster,
    ):
        group = RayWorkerGroup(cluster, Unwilling)
        pids = group.call("pid").get_results()
        pids += group.call("start_daemon", str(tmp_path), execute=True).get_results()
        assert group.shutdown()
        assert running(pids) == []
        lost = RayWorkerGroup(cluster, Unwilling)
        pids = lost.call("pid").get_results()
        head = ray.get_runtime_context().get_node_id()
        [rank] = [info.rank for info in lost.ranks if info.node_id != head]
        [node] = [n for n in nodes.list_all_nodes() if n.node_id != head]
        its = psutil.Process(node.all_processes["raylet"][0].process.pid).children(recursive=True)
        nodes.remove_node(node, allow_graceful=False)
        eventually(lambda: not running([one.pid for one in its]), "nobody there can answer any more")
        assert not lost.shutdown(timeout=60)
        assert list(lost.unended) == [rank]
        assert f"rank {rank} is not known to have ended" in caplog.text
        assert not is_running(pids[1 - rank])
        eventually(lambda: not running(pids), "Ray's workers follow their node")
        monkeypatch.setattr(bundles, "_LOOK_S", 0.0)
        with RayWorkerGroup(cluster, Unwilling, bundle_indices_list=[[1 - rank]]) as living:
            kill(living, 0)
            assert living.restart_failed_workers() == [0]


@pytest.fixture
def lingering(monkeypatch):
    """For each question about the end of workers, what is left of each; then what is true."""
    answers, ask = [], questions.ask

    def some_are_left(method, workers, timeout_s, **options):
        found = ask(method, workers, timeout_s, **options)
        if method != "end" or not workers or not answers or (left := answers.pop(0)) is None:
            return found
        return dict.fromkeys(found, left)

    monkeypatch.setattr("raycrew.worker_groups._health.ending.ask", some_are_left)
    return answers


def test_new_workers_that_fail_and_linger_are_ended_before_others_come(cluster, lingering, tmp_path):
    with RayWorkerGroup(cluster, Moody, folder=str(tmp_path)) as group:
        Path(tmp_path, "bad").touch()
        kill(group, 0)
        lingering += [None, [[1234]], [[1234]]]  # the old one has ended, the new one has not
        with pytest.raises(WorkerFailureError, match="not today"):
            group.restart_failed_workers()
        Path(tmp_path, "bad").unlink()
        with pytest.raises(WorkerGroupError, match=r"restart have not ended.*rank 0: processes \[1234\]"):
            group.restart_failed_workers()
        assert group.restart_failed_workers() == [0]
        assert lingering == []


@pytest.mark.long  # in short: test_a_failed_start_that_lingers_keeps_its_bundles
def test_new_workers_that_fail_and_linger_keep_their_bundles(cluster, lingering, tmp_path):
    group = RayWorkerGroup(cluster, Moody, folder=str(tmp_path))
    Path(tmp_path, "bad").touch()
    kill(group, 1)
    lingering += [None, [[1234]]]
    with pytest.raises(WorkerFailureError, match="not today"):
        group.restart_failed_workers()
    lingering += [None, [[1234]]]
    assert not group.shutdown()
    assert list(group.unended) == [1]
    del group
    gc.collect()
    with pytest.raises(BundlesOccupiedError):
        cluster.claim(None, "the next")
    Path(tmp_path, "bad").unlink()
    with RayWorkerGroup(cluster, Moody, folder=str(tmp_path)) as after:  # tries again
        assert len(after.call("pid").get_results()) == 2


def test_a_failed_start_that_lingers_keeps_its_bundles(cluster, lingering, tmp_path):
    Path(tmp_path, "bad").touch()
    lingering += [[[1234], []], [[1234]]]
    with pytest.raises(WorkerFailureError, match="not today"):
        RayWorkerGroup(cluster, Moody, folder=str(tmp_path))
    gc.collect()
    with pytest.raises(BundlesOccupiedError):
        RayWorkerGroup(cluster, Unwilling)
    assert lingering == []
    with RayWorkerGroup(cluster, Unwilling) as after:
        assert len(after.call("pid").get_results()) == 2


def test_what_can_not_be_ended_keeps_its_bundle(group, cluster, lingering, caplog):
    lingering += [[[1234], []]]
    assert not group.shutdown()
    assert list(group.unended) == [0]
    assert "processes [1234]" in caplog.text
    with pytest.raises(BundlesOccupiedError):
        cluster.claim(None, "the next")
    assert group.shutdown()
    assert group.unended == {}
    assert free(cluster)
