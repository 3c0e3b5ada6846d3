"""Workers in processes that Ray has started, and modules that it has imported, before anyone asked."""

import sys

import psutil
from patience import eventually

from raycrew.cluster_core import RayVirtualCluster
from raycrew.cluster_core.testing import connected, simulated_nodes
from raycrew.worker_groups import RayWorkerGroup

MODULE = "stringprep"


class Looks:
    def __init__(self):
        self.found = MODULE in sys.modules

    def look(self):
        return self.found, psutil.Process().pid


def idle_processes():
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline()[:1] == ["ray::IDLE"]:
                found.add(process.pid)
        except psutil.Error:
            continue
    return found


def test_workers_take_prestarted_processes_with_preloaded_modules(monkeypatch):
    monkeypatch.setenv("RAY_preload_python_modules", MODULE)
    others = idle_processes()
    with simulated_nodes([{"num_cpus": 2}]) as ray_cluster, connected(ray_cluster.address):
        eventually(lambda: len(idle_processes() - others) >= 2, "Ray has started processes for its CPUs")
        waiting = idle_processes()
        with (
            RayVirtualCluster([2], use_gpus=False) as cluster,
            RayWorkerGroup(cluster, Looks, env_vars={"COLOUR": "red"}) as group,
        ):
            looks = group.call("look").get_results()
        assert {pid for _, pid in looks} <= waiting
        assert [found for found, _ in looks] == [True, True]
