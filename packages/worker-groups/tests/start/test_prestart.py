"""Workers in processes that Ray has started, and modules that it has imported, before anyone asked."""

import sys

import psutil
import pytest
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


def takes_a_waiting_process():
    """Whether the process of a worker waited before; one that Ray has just started does not know it yet."""
    waiting = idle_processes()
    with (
        RayVirtualCluster([1], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Looks, env_vars={"COLOUR": "red"}) as group,
    ):
        ((preloaded, pid),) = group.call("look").get_results()
    assert preloaded
    return pid in waiting


@pytest.mark.long
def test_workers_take_prestarted_processes_with_preloaded_modules(monkeypatch):
    monkeypatch.setenv("RAY_preload_python_modules", MODULE)
    others = idle_processes()
    with simulated_nodes([{"num_cpus": 1}]) as ray_cluster, connected(ray_cluster.address):
        eventually(lambda: idle_processes() - others, "Ray has started a process for its CPU")
        eventually(takes_a_waiting_process, "a worker is in a process that waited")
