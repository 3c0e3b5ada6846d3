"""A cluster of `ray start` with a real autoscaler: found by itself, and waited for until nodes have come."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
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

STORE = 80 << 20
WORKER = {"resources": {"CPU": 2, "GPU": 2, "object_store_memory": STORE}, "min_workers": 0, "max_workers": 1}
HEAD = {"resources": {"CPU": 1}, "min_workers": 0, "max_workers": 0}


def configuration(address):
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
        "available_node_types": {
            "ray.head.default": {**HEAD, "node_config": {}},
            "worker": {**WORKER, "node_config": {}},
        },
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


@pytest.fixture
def launching(monkeypatch):
    """This process on a cluster whose autoscaler launches one node of two devices when it is asked to."""
    ray.shutdown()
    for name in ("RAY_ADDRESS", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    with tempfile.TemporaryDirectory(prefix="rc", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        with lease_ports(port_range=(22000, 22999)) as lease:
            address = f"{ray.util.get_node_ip_address()}:{lease.port}"
        file = Path(folder, "autoscaler.json")
        file.write_text(json.dumps(configuration(address)))
        head = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                *(f"--port={lease.port}", "--num-cpus=1", f"--object-store-memory={STORE}"),
                *("--include-dashboard=false", f"--autoscaling-config={file}"),
            ],
            env={**os.environ, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "3"},
            stdout=subprocess.DEVNULL,
        )
        try:
            with join(head) as connection:
                assert connection.address == address
                yield
        finally:
            head.send_signal(signal.SIGTERM)
            head.wait(120)
            end_all(folder)


def join(head):
    """Join what `ray start` made, once it has."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return init_ray("auto")
        except NoClusterError:
            assert head.poll() is None, "the head node ended"
            assert time.monotonic() < deadline
            time.sleep(0.1)


def end_all(folder):
    """End what the autoscaler launched: nobody else does."""
    for process in psutil.process_iter(["cmdline"]):
        if any(folder in part for part in process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.slow
def test_nodes_that_an_autoscaler_launches_are_waited_for(launching):
    with RayVirtualCluster([2], timeout_s=240) as cluster:  # Asked before the autoscaler names a node.
        assert len(ray.nodes()) == 2 and len({bundle.node_id for bundle in cluster.bundles}) == 1
        with pytest.raises(AllocationTimeoutError, match="within 2 s") as error:
            RayVirtualCluster([3], timeout_s=2, name="too-large")
        assert "room for 0 bundles, on empty nodes for 2" in str(error.value)
        assert "held by placement group 'cluster-" in str(error.value)
    groups = placement_group_table().values()
    assert not [group["name"] for group in groups if group["state"] != "REMOVED"]
