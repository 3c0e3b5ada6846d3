"""Ports that are leased on the nodes of a cluster."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorUnavailableError
from watching import wait_until

from raycrew.cluster_core import (
    ClusterClosedError,
    ClusterError,
    NodeLostError,
    PortsExhaustedError,
    _ray,
    lease_ports,
)
from raycrew.cluster_core._ports import PortKeepers
from raycrew.cluster_core._ray import status as _ray_status


def running_keepers():
    return [one for one in _ray_status.actor_states() if one.class_name == "PortKeeper"]


def test_nobody_leases_ports_of_a_cluster_that_was_shut_down_meanwhile(local_ray):
    here, keepers = ray.get_runtime_context().get_node_id(), PortKeepers()
    assert keepers.lease(here).port
    keepers.close()
    with pytest.raises(ClusterClosedError, match="went back when it was shut down"):
        keepers.lease(here)
    wait_until(lambda: not running_keepers())


def test_a_lost_answer_ends_no_lease(local_ray, monkeypatch):
    here, keepers = ray.get_runtime_context().get_node_id(), PortKeepers()
    first = keepers.lease(here)
    with monkeypatch.context() as patch:
        broken = SimpleNamespace(check=lambda: None, get=lose_the_answer, while_connected=nullcontext)
        patch.setattr(_ray, "check_connected", lambda: broken)
        with pytest.raises(ClusterError, match="gave no answer") as caught:
            keepers.lease(here)
    assert not isinstance(caught.value, NodeLostError)
    assert keepers.lease(here).port != first.port and len(running_keepers()) == 1
    with pytest.raises(PortsExhaustedError):
        lease_ports(port_range=(first.port, first.port))
    keepers.close()


def test_leases_that_wait_for_a_dead_keeper_end_no_lease_of_the_next_one(local_ray, monkeypatch):
    here, keepers = ray.get_runtime_context().get_node_id(), PortKeepers()
    start, started = _ray.start_actor, []

    def start_and_note(*arguments):
        started.append(start(*arguments))
        return started[-1]

    with monkeypatch.context() as patch:
        patch.setattr(_ray, "start_actor", start_and_note)
        keepers.lease(here)
    ray.kill(started.pop())
    wait_until(lambda: not running_keepers())  # Until then it may answer.
    waits = [keepers.start(here) for _ in range(2)]
    with pytest.raises(NodeLostError):
        waits[0]()
    second = keepers.lease(here)
    with pytest.raises(NodeLostError):
        waits[1]()
    keepers.lease(here)
    wait_until(lambda: len(running_keepers()) == 1)
    with pytest.raises(PortsExhaustedError):
        lease_ports(port_range=(second.port, second.port))
    keepers.close()


def lose_the_answer(ref, timeout):
    ray.get(ref, timeout=timeout)
    raise ActorUnavailableError("the connection broke", None)
