"""A cluster of `ray start`, as people and job scripts make it: on IPv6 where there is, with an autoscaler."""

import contextlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import ray
from ray.util.placement_group import placement_group_table

from raycrew.cluster_core import (
    AllocationTimeoutError,
    NoClusterError,
    RayVirtualCluster,
    init_ray,
    lease_ports,
)
from raycrew.cluster_core._connection.addresses import split_address

STORE = 80 << 20
SLURM_TAG = {"slurm_managed_ray_cluster": 1}
JOB = str(os.getpid())
HEAD = {"resources": {"CPU": 1}, "min_workers": 0, "max_workers": 0, "node_config": {}}
WORKER = {**HEAD, "resources": {"CPU": 2, "GPU": 2, "object_store_memory": STORE}, "max_workers": 1}


def own_address():
    """An IPv6 address that others could reach, where this machine has one and this Ray starts on it."""
    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    for one in (one for addresses in psutil.net_if_addrs().values() for one in addresses):
        if one.family == socket.AF_INET6 and version >= (2, 60):
            address = ipaddress.ip_address(one.address.partition("%")[0])
            if not (address.is_loopback or address.is_link_local):
                return str(address)
    return ray.util.get_node_ip_address()


def autoscaling(address):
    """An autoscaler that launches nodes on this machine; Ray's own tests use it."""
    return {
        "cluster_name": "launching",
        "max_workers": 1,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 5,
        "provider": {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": address,
            "disable_launch_config_check": True,
            "disable_node_updaters": True,
        },
        "available_node_types": {"ray.head.default": HEAD, "worker": WORKER},
        "head_node_type": "ray.head.default",
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        **{
            f"{where}_commands": []
            for where in (
                *("initialization", "setup", "head_setup", "worker_setup"),
                *("head_start_ray", "worker_start_ray"),
            )
        },
        "file_mounts_sync_continuously": False,
    }


@dataclass
class Head:
    """A head node, and the folder of its session, in which `ray start` writes down what it made."""

    address: str
    folder: str


@pytest.fixture(scope="module")
def head():
    """A cluster of a Slurm job whose autoscaler launches one node of two devices when it is asked to."""
    ray.shutdown()
    with tempfile.TemporaryDirectory(prefix="rc", dir="/tmp", ignore_cleanup_errors=True) as folder:
        host = own_address()
        with lease_ports(port_range=(22000, 22999)) as lease:
            address = f"[{host}]:{lease.port}" if ":" in host else f"{host}:{lease.port}"
        file = Path(folder, "autoscaler.json")
        file.write_text(json.dumps(autoscaling(address)))
        settings = {"RAY_TMPDIR": folder, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "5"}
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                *(f"--node-ip-address={host}", f"--port={lease.port}", "--include-dashboard=false"),
                *("--num-cpus=1", f"--object-store-memory={STORE}", f"--resources={json.dumps(SLURM_TAG)}"),
                *(f"--labels=raycrew.slurm-job={JOB}", f"--autoscaling-config={file}"),
            ],
            env={**os.environ, **settings},
            stdout=subprocess.DEVNULL,
        )
        try:
            with pytest.MonkeyPatch.context() as patch:
                leave_nothing_that_names_a_cluster(patch)
                patch.setenv("RAY_TMPDIR", folder)
                join(process).close()
            yield Head(address, folder)
        finally:
            ray.shutdown()
            process.send_signal(signal.SIGTERM)
            process.wait(120)
            end_all(folder)


def end_all(folder):
    """End what the autoscaler launched: nobody else does."""
    for process in psutil.process_iter(["cmdline"]):
        if any(folder in part for part in process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def leave_nothing_that_names_a_cluster(patch):
    for name in ("RAY_ADDRESS", "SLURM_JOB_ID"):
        patch.delenv(name, raising=False)
    patch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def apart(monkeypatch):
    ray.shutdown()  # tests on one local Ray leave this process connected to it
    leave_nothing_that_names_a_cluster(monkeypatch)
    return monkeypatch


def join(process):
    """Join what `ray start` made, once it has."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return init_ray("auto")
        except NoClusterError:
            assert process.poll() is None, "the head node ended"
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.long
@pytest.mark.slow
def test_nodes_that_an_autoscaler_launches_are_waited_for(head, apart):
    """The first test of the module: the autoscaler names no node yet when it asks."""
    apart.setenv("RAY_TMPDIR", head.folder)
    with init_ray() as connection, RayVirtualCluster([2], timeout_s=240) as cluster:
        assert connection.address == head.address and not connection.started_here
        assert len({bundle.node_id for bundle in cluster.bundles}) == 1
        assert sum(node["Alive"] for node in ray.nodes()) == 2
        with pytest.raises(AllocationTimeoutError, match="within 2 s") as error:
            RayVirtualCluster([3], timeout_s=2, name="too-large")
        assert "room for 0 of them, on empty nodes for 2" in str(error.value)
        assert "held by placement group 'cluster-" in str(error.value)
        cluster.shutdown()
        groups = placement_group_table().values()
        assert not [group["name"] for group in groups if group["state"] != "REMOVED"]


def test_a_rendezvous_is_where_processes_can_meet(local_ray):
    meet(local_ray)


@pytest.mark.long
@pytest.mark.slow
def test_and_on_a_cluster_of_ray_start(head, apart):
    apart.setenv("RAY_ADDRESS", head.address)
    with init_ray():
        meet(head.address)


def meet(address):
    """Processes meet at a rendezvous on the only node of the cluster of this address."""
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        meeting = cluster.rendezvous(n_ports=2)
        host, _ = split_address(address)
        assert meeting.address == host and split_address(meeting.endpoint) == (host, meeting.port)
        for port in meeting.ports:  # Kept for a server that reuses the port, as torch's store does.
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with (
                socket.create_server((host, port), family=family),
                socket.create_connection((meeting.address, port), timeout=60),
            ):
                pass
            with pytest.raises(OSError, match="in use"), socket.socket(family) as other:
                other.bind((host, port))


@pytest.mark.long  # in short, without Ray: test_discovery's choices
@pytest.mark.slow
def test_reuse_by_slurm_tag(head, apart, tmp_path):
    """The autoscaler's node is of this cluster, on this machine too, and carries no tag."""
    apart.setenv("RAY_TMPDIR", str(tmp_path))  # Nothing is recorded there.
    apart.setenv("SLURM_JOB_ID", f"{JOB}0")
    with pytest.raises(NoClusterError):
        init_ray("auto")
    apart.setenv("SLURM_JOB_ID", JOB)
    with init_ray() as connection:
        assert connection.address == head.address
