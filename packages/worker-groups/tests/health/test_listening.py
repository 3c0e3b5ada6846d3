"""Who listens where, as the page on security says: raycrew's own opens nothing beside what Ray does."""

import os

import psutil
import pytest
import ray
from patience import PATIENCE_S
from workers import Patient

from raycrew.worker_groups import RayWorkerGroup, fan_out, timeline
from raycrew.worker_groups._health import watches


def open_to_others(pid, with_children=True):
    """Sockets that a process, or what it has started, listens at, but for those of the loopback."""
    process = psutil.Process(pid)
    return [
        (one.pid, connection.laddr)
        for one in (process, *(process.children(recursive=True) if with_children else ()))
        for connection in one.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and not connection.laddr.ip.startswith(("127.", "::1"))
    ]


@pytest.mark.hostile
def test_no_worker_watch_keeper_pool_or_timeline_listens_at_more_than_an_actor_of_rays(cluster, pool):
    @ray.remote(num_cpus=0)
    class Bare:
        def pid(self):
            return os.getpid()

    bare = Bare.remote()
    of_ray = len(open_to_others(ray.get(bare.pid.remote(), timeout=PATIENCE_S)))
    assert of_ray >= 1, "the search finds things"
    before = open_to_others(os.getpid(), with_children=False)  # not of the Ray that it has started
    with timeline(metrics=True), RayWorkerGroup(cluster, Patient, memory_limit="8GB") as group:
        pids = group.call("pid").get_results()
        asked = [watch.__ray_call__.remote(lambda _: os.getpid()) for watch in watches._watches.values()]
        pids += ray.get(asked, timeout=PATIENCE_S)
        for pid in {*pids, *fan_out(lambda _: os.getppid(), range(4), progress=False)}:
            assert len(found := open_to_others(pid)) <= of_ray, found
        assert open_to_others(os.getpid(), with_children=False) == before, "nor does the driver"
