"""Processes that a worker forks, as data loaders do, and that forget there what it has of Ray."""

import os

import pytest
import ray

from raycrew.worker_groups import RayWorkerGroup

pytestmark = pytest.mark.hostile


class Loader:
    """A worker whose forked processes have its references, too."""

    def load(self):
        held = [ray.put(bytes([number]) * 200_000) for number in range(4)]
        children = []
        for _ in range(2):
            child = os.fork()
            if child == 0:
                held.clear()
                os._exit(0)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        return codes, [ray.get(one)[0] for one in held]


def test_they_take_nothing_of_it_along(cluster):
    with RayWorkerGroup(cluster, Loader) as group:
        for _ in range(2):
            assert group.call("load").get_results(timeout=120) == [([0, 0], [0, 1, 2, 3])] * 2
