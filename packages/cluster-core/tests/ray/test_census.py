"""Who holds what on nodes, put together from what Ray says."""

import pytest

from raycrew.cluster_core import NodeState
from raycrew.cluster_core._ray import census
from raycrew.cluster_core._ray.questions import GroupState
from raycrew.cluster_core._ray.status import ActorState

pytestmark = pytest.mark.smoke


def test_what_nobody_is_known_to_hold_is_told_as_a_rest(monkeypatch):
    groups = [
        GroupState("train", "CREATED", "", [{"CPU": 2.0}, {"CPU": 1.0}], ["n0", "n1"], "g0"),
        GroupState("gone", "REMOVED", "", [{"CPU": 9.0}], ["n0"], "g1"),
        GroupState("moving", "RESCHEDULING", "", [{"CPU": 0.5}], ["n2"], "g2"),
    ]
    actors = [
        ActorState("", "Rollout", "n0", {"CPU": 1.0}),
        ActorState("", "Rollout", "n0", {"GPU": 0.5}),
        ActorState("", "Idle", "n1", {}),
    ]
    monkeypatch.setattr(census.questions, "group_states", lambda: groups)
    monkeypatch.setattr(census._ray_status, "actor_states", lambda: actors)
    total = {"CPU": 8.0, "GPU": 1.0, "memory": 9e9, "node:10.0.0.1": 1.0}
    nodes = [
        NodeState("n0", "10.0.0.1", total, {"CPU": 3.5, "GPU": 0.5}, {}),
        NodeState("n1", "10.0.0.2", {"CPU": 1.0, "disk": 1.0}, {"disk": 1.0}, {}),
        NodeState("n2", "10.0.0.3", {"CPU": 1.0}, {"CPU": 0.5}, {}),
    ]
    assert census.holders_by_node(nodes) == {
        "n0": [
            "placement group 'train' (2 CPU)",
            "actors of Rollout (1 CPU, 0.5 GPU)",
            "tasks, or what was freed a moment ago (1.5 CPU)",
        ],
        "n1": ["placement group 'train' (1 CPU)"],
        "n2": ["placement group 'moving' (0.5 CPU)"],
    }


def test_nodes_come_by_domain_and_then_by_the_numbers_of_their_addresses(monkeypatch):
    addresses = ["fe80::1", "10.0.0.10", "10.0.0.9", "9.0.0.10", "10.0.0.x", "10.0.9"]
    nodes = [NodeState(f"n{i}", address, {}, {}, {}) for i, address in enumerate(addresses)]
    nodes += [NodeState("twin", "10.0.0.9", {}, {}), NodeState("last", "1.0.0.1", {}, {}, {"rack": "b"})]
    monkeypatch.setattr(census, "check_connected", lambda: None)
    monkeypatch.setattr(census._ray_status, "unordered_nodes", lambda: nodes)
    assert [(one.address, one.node_id) for one in census.node_states("rack")] == [
        ("9.0.0.10", "n3"),
        ("10.0.0.9", "n2"),
        ("10.0.0.9", "twin"),
        ("10.0.0.10", "n1"),
        ("10.0.0.x", "n4"),
        ("10.0.9", "n5"),
        ("fe80::1", "n0"),
        ("1.0.0.1", "last"),
    ]
