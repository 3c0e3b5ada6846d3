"""Ports that are leased on the nodes of a cluster."""

import pytest
import ray
from watching import wait_until

from raycrew.cluster_core import ClusterClosedError
from raycrew.cluster_core._ports import PortKeepers
from raycrew.cluster_core._ray import status as _ray_status


def test_nobody_leases_ports_of_a_cluster_that_was_shut_down_meanwhile(local_ray):
    here, keepers = ray.get_runtime_context().get_node_id(), PortKeepers()
    assert keepers.lease(here).port
    keepers.close()
    with pytest.raises(ClusterClosedError, match="went back when it was shut down"):
        keepers.lease(here)
    wait_until(lambda: not [one for one in _ray_status.actor_states() if one.class_name == "PortKeeper"])
