import time

import psutil
import pytest
import ray
from workers import Worker

from raycrew.cluster_core import RayVirtualCluster
from raycrew.worker_groups import RayWorkerGroup, UnknownMethodError

pytest_plugins = ["raycrew.cluster_core.testing"]


@pytest.fixture
def cluster(local_ray):
    with RayVirtualCluster([2], use_gpus=False) as made:
        yield made


@pytest.fixture
def group(cluster):
    made = RayWorkerGroup(cluster, Worker)
    yield made
    made.shutdown(force=True)


def assert_ended(pids):
    deadline = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, "workers are still there"
        time.sleep(0.05)


def test_cleaned_up_and_ended(group, tmp_path):
    pids = group.call("pid").get_results()
    assert group.shutdown("nothing")
    assert_ended(pids)


def test_a_failing_clean_up_is_told_and_workers_end(group, caplog):
    pids = group.call("pid").get_results()
    assert not group.shutdown("fail_to_clean")
    assert "no clean-up" in caplog.text
    assert_ended(pids)


def test_a_clean_up_that_does_not_exist_is_refused_first(group):
    with pytest.raises(UnknownMethodError):
        group.shutdown("clean_upp")
    assert len(group.call("pid").get_results()) == 2


def test_a_busy_worker_is_killed_when_its_time_is_over(group):
    pids = group.call("pid").get_results()
    group.on(ranks=[1]).call("nap", 3600)
    assert not group.shutdown(timeout=1.0)
    assert_ended(pids)


def test_force_waits_for_nobody(group):
    pids = group.call("pid").get_results()
    group.call("nap", 3600)
    assert group.shutdown(force=True)
    assert_ended(pids)


def test_dead_workers_are_no_obstacle(group, cluster):
    pids = group.call("pid").get_results()
    psutil.Process(pids[0]).kill()
    assert group.shutdown(timeout=60)
    assert_ended(pids)
    with RayWorkerGroup(cluster, Worker) as again:
        assert len(again) == 2


def test_an_error_inside_with_ends_busy_workers_at_once(cluster):
    start = time.monotonic()
    with pytest.raises(KeyError), RayWorkerGroup(cluster, Worker) as group:
        pids = group.call("pid").get_results()
        group.call("nap", 3600)
        raise KeyError
    assert time.monotonic() - start < 300
    assert_ended(pids)


def test_ray_may_be_down_already(local_ray, group, caplog):
    ray.shutdown()
    try:
        assert not group.shutdown()
        assert "Ray is down already" in caplog.text
        assert group.shutdown()
    finally:
        ray.init(address=local_ray, log_to_driver=False)
