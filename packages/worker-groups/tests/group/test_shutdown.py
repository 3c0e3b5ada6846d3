import atexit
import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
import ray
from forking import assert_ends_well
from patience import is_running
from workers import Worker

from raycrew.cluster_core.testing import connected
from raycrew.worker_groups import RayWorkerGroup, UnknownMethodError, WorkerGroupClosedError
from raycrew.worker_groups._ray.sessions import connection


@pytest.fixture
def group(cluster):
    made = RayWorkerGroup(cluster, Worker)
    yield made
    made.shutdown(force=True)


def assert_ended(pids):
    assert not any(map(is_running, pids))


def test_cleaned_up_and_ended(group, tmp_path):
    pids = group.call("pid").get_results()
    assert group.shutdown("nothing")
    assert_ended(pids)


def watch_collector(folder):
    gc.freeze = lambda: Path(folder, f"frozen {os.getpid()}").write_text("at last")


class Careless:
    """Closes nothing."""

    def __init__(self, folder):
        self.folder = folder
        self.notes = Path(folder, f"notes {os.getpid()}").open("w")  # noqa: SIM115
        self.notes.write("as they were")
        atexit.register(watch_collector, folder)

    def __del__(self):
        Path(self.folder, f"end {os.getpid()}").write_text(f"finalizing: {sys.is_finalizing()}")

    def pid(self):
        return os.getpid()


def test_what_a_worker_holds_is_given_up_after_its_exit_handlers_while_python_is_whole(cluster, tmp_path):
    with RayWorkerGroup(cluster, Careless, init={"folder": str(tmp_path)}) as group:
        pids = group.call("pid").get_results()
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    texts = {"notes": "as they were", "end": "finalizing: False", "frozen": "at last"}
    assert found == {f"{what} {pid}": text for pid in pids for what, text in texts.items()}


def test_a_failing_clean_up_is_told_and_workers_end(group, caplog):
    pids = group.call("pid").get_results()
    assert not group.shutdown("fail_to_clean")
    assert "no clean-up" in caplog.text
    assert_ended(pids)


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("method", "error"),
    [("clean_upp", UnknownMethodError), pytest.param("keep", TypeError, marks=pytest.mark.long)],
)
def test_a_clean_up_that_can_not_be_called_is_told_once_the_workers_have_ended(group, method, error):
    pids = group.call("pid").get_results()
    with pytest.raises(error):
        group.shutdown(method)
    assert_ended(pids)
    with pytest.raises(WorkerGroupClosedError):
        group.call("pid")


@pytest.mark.hostile
def test_a_busy_worker_is_killed_when_its_time_is_over(group):
    pids = group.call("pid").get_results()
    group.on(ranks=[1]).call("nap", 3600)
    assert not group.shutdown(timeout=1.0)
    assert_ended(pids)


@pytest.mark.hostile
def test_force_waits_for_nobody(group):
    pids = group.call("pid").get_results()
    group.call("nap", 3600)
    assert group.shutdown(force=True)
    assert_ended(pids)


@pytest.mark.hostile
def test_dead_workers_are_no_obstacle(group, cluster):
    pids = group.call("pid").get_results()
    psutil.Process(pids[0]).kill()
    assert group.shutdown(timeout=60)
    assert_ended(pids)
    with RayWorkerGroup(cluster, Worker) as again:
        assert len(again) == 2


FORKING = """
    import os, sys
    from workers import Worker
    from raycrew.cluster_core import RayVirtualCluster, init_ray
    from raycrew.worker_groups import RayWorkerGroup, WorkerGroupClosedError

    def child(group):
        refused = 0
        for use in (lambda: group.call("pid"), group.restart_failed_workers, group.renew_rendezvous,
                    lambda: group.resize(1), group.get_worker_status, group.handle):
            try:
                use()
            except WorkerGroupClosedError:
                refused += 1
        return refused == 6 and group.shutdown("nothing") is False

    with (
        init_ray(sys.argv[1]),
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker, restart_on_failure=True) as group,
    ):
        pids = group.call("pid").get_results(timeout=60)
        forked = os.fork()
        if forked == 0:
            code = 1
            try:
                with group:  # as code does that meets an error, and was not told that it is a child
                    code = 0 if child(group) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
        assert group.call("pid").get_results(timeout=60) == pids
    print("end", flush=True)
"""


@pytest.mark.hostile
@pytest.mark.long  # in short, without Ray: test_a_forked_process_waits_for_nothing_and_ends_nothing
def test_a_forked_driver_leaves_the_group_alone(local_ray):
    assert_ends_well(FORKING, local_ray)


@pytest.mark.hostile
def test_an_error_inside_with_ends_busy_workers_at_once(cluster):
    with pytest.raises(KeyError), RayWorkerGroup(cluster, Worker) as group:
        pids = group.call("pid").get_results()
        group.call("nap", 3600)
        raise KeyError
    assert_ended(pids)


@pytest.mark.hostile
def test_ray_may_be_down_already(local_ray, group, caplog):
    ray.shutdown()
    try:
        with pytest.raises(WorkerGroupClosedError, match="connection to Ray"):
            group.call("pid")
        assert not ray.is_initialized()
        assert not group.shutdown("nothing")
        assert "Ray is down already" in caplog.text
        assert not group.shutdown()
        assert list(group.unended) == [0, 1]
    finally:
        ray.init(address=local_ray, log_to_driver=False)


@pytest.mark.hostile
def test_a_later_connection_to_ray_is_not_taken_for_the_groups_own(local_ray, group):
    ray.shutdown()
    ray.init(address=local_ray, log_to_driver=False)
    with pytest.raises(WorkerGroupClosedError, match="connection to Ray"):
        group.run_rank_zero("pid")
    with pytest.raises(WorkerGroupClosedError, match="connection to Ray"):
        group.get_worker_status()
    assert not group.shutdown()


@pytest.mark.long  # in short: test_a_later_connection_to_ray_is_not_taken_for_the_groups_own
def test_each_connection_to_ray_is_told_from_all_others(local_ray_session, ray_nodes_session):
    """Every fresh cluster gives its first driver the same job and worker ids."""
    seen = []
    for address in (local_ray_session, ray_nodes_session, local_ray_session):
        ray.shutdown()
        assert connection() is None
        with connected(address):
            seen.append(connection())
            assert connection() == seen[-1]
    assert len(set(seen)) == 3


def test_clean_up_may_have_a_timeout_of_its_own(group):
    group.call("keep", "fresh").get_results()
    assert group.shutdown("clean_with_timeout")


AT_EXIT = """
    import atexit, ray, sys
    from raycrew.cluster_core import RayVirtualCluster
    from raycrew.worker_groups import RayWorkerGroup
    from workers import Worker
    ray.init(address=sys.argv[1], log_to_driver=False)
    cluster = RayVirtualCluster([1], use_gpus=False)
    group = RayWorkerGroup(cluster, Worker)
    print(group.call("add", 1).get_results(), flush=True)
    atexit.register(cluster.shutdown)
    atexit.register(group.shutdown, "pid", timeout=60)
"""


@pytest.mark.hostile
@pytest.mark.smoke
def test_at_the_end_of_the_interpreter(local_ray):
    """Where no thread can be started from Python 3.12 on."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(AT_EXIT), local_ray],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[1]"), done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
