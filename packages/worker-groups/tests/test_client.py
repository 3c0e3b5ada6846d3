"""Through a `ray://` proxy: groups and `fan_out` work as they do without."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest
from patience import eventually

from raycrew.cluster_core import lease_ports
from raycrew.cluster_core.testing import simulated_nodes

pytest.importorskip("grpc", reason="Ray's client is not installed")
pytestmark = pytest.mark.hostile

DRIVER = """
    from raycrew.cluster_core import RayVirtualCluster, init_ray
    from raycrew.worker_groups import RayWorkerBuilder, RayWorkerGroup, close_fan_out, fan_out

    class Adder:
        def __init__(self, step):
            self.step = step

        def add(self, number):
            return number + self.step

    with init_ray(), RayVirtualCluster([2], use_gpus=False) as cluster:
        with RayWorkerGroup(cluster, RayWorkerBuilder(Adder, step=3)) as group:
            added = group.run_all_workers_multiple_data("add", number=[1, 2]).get_results(timeout=60)
        squares = fan_out(lambda number: number**2, range(50))
        close_fan_out()
    print(added, sum(squares))
"""


def listens(port):
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.long
@pytest.mark.slow
def test_groups_and_fan_out_work_behind_a_proxy():
    with lease_ports(port_range=(24000, 24999)) as lease:
        port = lease.port
    with simulated_nodes([{"num_cpus": 4, "ray_client_server_port": port}]):
        eventually(lambda: listens(port), "the proxy listens")
        driver = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(DRIVER)],
            env={**os.environ, "RAY_ADDRESS": f"ray://127.0.0.1:{port}"},
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip
    assert driver.returncode == 0, driver.stdout + driver.stderr
    assert driver.stdout.splitlines()[-1] == f"[4, 5] {sum(n**2 for n in range(50))}"
