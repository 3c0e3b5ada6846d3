"""What bundles are asked of their devices."""

import asyncio
import threading

import pytest
import ray
from ray.exceptions import TaskCancelledError

from raycrew.cluster_core import RayVirtualCluster
from raycrew.cluster_core._devices import probe
from raycrew.cluster_core._ray.session import Session


@ray.remote
class Busy:
    def ping(self):
        pass


def test_a_question_that_is_given_up_takes_no_device_later(ray_nodes, monkeypatch):
    start, asked, raised, given_up = probe.start_tasks, [], [], threading.Event()
    given_up.set()

    def started(*arguments):
        asked.extend(start(*arguments))
        return asked

    def ask():
        with Session.until_set(given_up), pytest.raises(asyncio.CancelledError) as caught:
            probe.probe_devices([(cluster.get_placement_groups()[0], 0)], "GPU", [1.0], 120)
        raised.append(caught)

    monkeypatch.setattr(probe, "start_tasks", started)
    with RayVirtualCluster([1]) as cluster:
        busy = Busy.options(**cluster.claim(None, "busy").actor_options(0)).remote()
        ray.get(busy.ping.remote(), timeout=120)
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(120)
        assert raised
        with pytest.raises(TaskCancelledError):
            ray.get(asked, timeout=60)
