"""What is there, and waiting until it is."""

import time

import ray
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2
from ray.util.placement_group import placement_group_table


def live_groups():
    return [entry["name"] for entry in placement_group_table().values() if entry["state"] != "REMOVED"]


def wait_until(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def drain(node_id):
    """As a cloud does some minutes before it takes a machine back."""
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + 600) * 1000)
    client = GcsClient(ray.get_runtime_context().gcs_address)
    assert client.drain_node(node_id, reason, "spot", deadline_ms)[0]
