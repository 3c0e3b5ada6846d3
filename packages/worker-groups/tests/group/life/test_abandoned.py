"""Groups that nobody shut down."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import warnings

import psutil
import pytest
import ray
from patience import eventually, is_running
from workers import Worker

from raycrew.cluster_core import RayVirtualCluster, ResourceInsufficientError
from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import RayWorkerGroup, WorkerGroupClosedError
from raycrew.worker_groups._group.life import abandoned as abandoned
from raycrew.worker_groups._group.life import ending as ending
from raycrew.worker_groups._group.life.abandoned import InUse, catch_up, watch_over
from raycrew.worker_groups.testing import InProcessGroup

pytestmark = pytest.mark.hostile


def test_a_group_out_of_scope_gives_back_its_workers_and_slots(local_ray, recwarn, tmp_path):
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        group = RayWorkerGroup(cluster, Worker, enable_load_balancing=True, diagnose=tmp_path)
        pids = group.call("pid").get_results()
        del group
        with RayWorkerGroup(cluster, Worker) as again:  # waits for the slots
            assert not any(map(is_running, pids))
            assert len(again.call("pid").get_results()) == 2
    assert [
        w for w in recwarn if w.category is ResourceWarning and "'Worker' went out of scope" in str(w.message)
    ]


CELL = """
cluster = RayVirtualCluster([{cpus}], use_gpus=False, name="mine", timeout_s={timeout_s})
group = RayWorkerGroup(cluster, Worker, 1)
"""


def run_cell(cpus, names, timeout_s=60):
    exec(CELL.format(cpus=cpus, timeout_s=timeout_s), names)
    return names["group"].call("pid").get_results(timeout=60)


def test_a_notebook_cell_run_twice_leaves_what_it_made_last(local_ray, recwarn):
    names = {"RayVirtualCluster": RayVirtualCluster, "RayWorkerGroup": RayWorkerGroup, "Worker": Worker}
    first, second = run_cell(2, names), run_cell(2, names)
    gc.collect()
    assert catch_up(60)
    eventually(lambda: not any(map(is_running, first)), "the first workers have ended")
    eventually(lambda: len(created_groups()) == 1, "the first bundles are given back")
    said = [str(w.message) for w in recwarn if w.category is ResourceWarning]
    own = ("worker group 'Worker'", "'mine'")  # the collector finds what others have left, too
    assert [own[0] in text for text in said if any(name in text for name in own)] == [True, False]
    assert names["group"].call("pid").get_results(timeout=60) == second
    assert names["group"].shutdown()
    names["cluster"].shutdown()


def created_groups():
    table = ray.util.placement_group_table()
    return [entry for entry in table.values() if entry["state"] == "CREATED"]


@pytest.mark.long  # in short: test_a_notebook_cell_run_twice_leaves_what_it_made_last
def test_a_cell_that_has_no_room_beside_itself_says_who_holds_it(local_ray):
    names = {"RayVirtualCluster": RayVirtualCluster, "RayWorkerGroup": RayWorkerGroup, "Worker": Worker}
    first = run_cell(5, names)
    with pytest.raises(ResourceInsufficientError, match="mine"):
        run_cell(5, names, timeout_s=1)
    assert names["group"].call("pid").get_results(timeout=60) == first
    names["group"].shutdown()
    names["cluster"].shutdown()
    assert run_cell(5, names) != first


def test_a_pending_call_keeps_its_workers(local_ray, tmp_path):
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        pids = []
        future = _called(cluster, tmp_path / "gate", pids)
        gc.collect()
        assert catch_up(60)
        assert is_running(pids[0])
        (tmp_path / "gate").touch()
        assert future.get_results(timeout=60) == [0]
        del future
        gc.collect()
        assert catch_up(60)
        eventually(lambda: not is_running(pids[0]), "the worker has ended")
        assert cluster.claim(None, "next").bundles


def _called(cluster, gate, pids):
    group = RayWorkerGroup(cluster, Worker)
    pids += group.call("pid").get_results()
    return group.call("wait_for", str(gate))


def test_after_the_users_own_shutdown_nothing_is_asked_of_another_ray(local_ray, caplog):
    group = RayWorkerGroup(RayVirtualCluster([1], use_gpus=False), Worker)
    ray.shutdown()
    try:
        del group
        gc.collect()
        assert catch_up(60)
        assert not ray.is_initialized()
        assert "Ray is down already" in caplog.text
    finally:
        ray.init(address=local_ray, log_to_driver=False)


def test_a_group_in_process_gives_back_its_slots():
    cluster = FakeCluster([2])
    with pytest.warns(ResourceWarning, match="'policy' went out of scope"):
        InProcessGroup(cluster, Worker, name_prefix="policy")
        gc.collect()
        assert catch_up(60)
    assert cluster.holders() == {}
    with InProcessGroup(cluster, Worker) as group, warnings.catch_warnings():
        warnings.simplefilter("error")
        group.shutdown()
        gc.collect()
        assert catch_up(60)


@pytest.mark.hostile
@pytest.mark.parametrize("ends_again", [True, False])
def test_a_shutdown_that_is_interrupted_is_made_once_more_or_by_the_collector(monkeypatch, ends_again):
    cluster, end = FakeCluster([2]), ending.end_and_release

    def interrupted(*given, **named):
        monkeypatch.setattr(ending, "end_and_release", end)
        raise KeyboardInterrupt

    monkeypatch.setattr(ending, "end_and_release", interrupted)
    group = InProcessGroup(cluster, Worker, name_prefix="policy")
    with pytest.raises(KeyboardInterrupt):
        group.shutdown()
    with pytest.raises(WorkerGroupClosedError):
        group.call("pid")
    if ends_again:
        assert group.shutdown(), "not the answer of one that never was"
    else:
        with pytest.warns(ResourceWarning, match="'policy' went out of scope"):
            del group
            gc.collect()
            assert catch_up(60)
    assert cluster.holders() == {}


def test_the_collector_may_run_under_any_lock(monkeypatch):
    """Even one that the work needs: the collector's thread only leaves a note."""
    lock, given_back = threading.Lock(), threading.Event()

    def give_back():
        with lock:
            given_back.set()

    in_use = InUse()
    watch_over(in_use, "a thing", give_back)
    with lock, warnings.catch_warnings():
        warnings.simplefilter("error")
        del in_use
        assert not given_back.is_set()
    assert given_back.wait(60)


def test_a_failure_does_not_end_the_thread(caplog):
    in_use = InUse()
    with pytest.warns(ResourceWarning):
        watch_over(in_use, "a thing", lambda: 1 / 0)
        del in_use
        assert catch_up(60)
    assert "could not be given back" in caplog.text
    assert catch_up(60)


def test_a_forked_process_leaves_alone_what_is_its_parents():
    in_use, given_back = InUse(), []
    end_watch = watch_over(in_use, "a thing", lambda: given_back.append(os.getpid()))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            own = InUse()
            watch_over(own, "own", lambda: given_back.append("own"))
            del in_use, own
            warnings.simplefilter("ignore")
            code = 0 if catch_up(30) and given_back == ["own"] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert given_back == []
    end_watch()


def test_nothing_is_done_at_the_end_of_the_interpreter():
    program = """
        from raycrew.cluster_core.testing import FakeCluster
        from raycrew.worker_groups.testing import InProcessGroup

        class Worker:
            pass

        group = InProcessGroup(FakeCluster([1]), Worker)
    """
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", textwrap.dedent(program)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert psutil.Process().is_running()
    assert abandoned.catch_up(60)
