"""What an allocation does when Ray grants other devices than the wanted ones, without Ray."""

import pytest

from raycrew.cluster_core import NodeState
from raycrew.cluster_core._devices import DevicesTakenError
from raycrew.cluster_core._placement.allocation import Allocator, _ray
from raycrew.cluster_core._planning import PlacementRequest, plan_cluster


class Session:
    def check(self):
        """Still connected."""


class TakenAtFirst(Allocator):
    """Grants what is planned, but for the first time, when a wanted device is taken."""

    def _grant(self, nodes, plan, number):
        if number == 1:
            raise DevicesTakenError("device 0 is taken", plan.node_ids[0][0])
        return plan.node_ids


@pytest.mark.parametrize("order", [None, {"a": 0, "b": 1}, lambda node: node.free["GPU"]])
def test_an_order_finds_what_it_asks_for_on_nodes_that_are_passed_over(monkeypatch, order):
    monkeypatch.setattr(_ray, "check_connected", Session)
    nodes = [NodeState(name, "10.0.0.1", {"GPU": 4.0}, {"GPU": free}) for name, free in (("a", 2), ("b", 3))]
    request = PlacementRequest((2,), {"GPU": 1.0}, node_order=order)
    assert plan_cluster(nodes, request).node_ids == (("a", "a"),)
    options = {"census": lambda label: nodes, "sleep": lambda seconds: None}
    assert TakenAtFirst(request, alias="retried", **options).allocate() == (("b", "b"),)
