"""What is there, and waiting until it is."""

import time

from ray.util.placement_group import placement_group_table


def live_groups():
    return [entry["name"] for entry in placement_group_table().values() if entry["state"] != "REMOVED"]


def wait_until(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
