"""What an allocation does when Ray grants other devices than the wanted ones, or nothing, without Ray."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from raycrew.cluster_core import AllocationTimeoutError, NodeState, ResourceInsufficientError
from raycrew.cluster_core._devices import DevicesTakenError
from raycrew.cluster_core._placement import allocation
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


@pytest.fixture
def never_granting(monkeypatch):
    """Ray, which lets every group wait; a clock on which waits take their time."""
    clock = SimpleNamespace(now=0.0)
    pending = SimpleNamespace(state="PENDING", scheduling_state="PENDING", name="a-node0")

    def await_group(_group, timeout_s):
        clock.now += timeout_s
        return False

    for name, instead in {
        "check_connected": Session,
        "create_group": lambda *_: object(),
        "await_group": await_group,
        "group_state": lambda _group: pending,
        "withdraw_groups": lambda _groups: None,
    }.items():
        monkeypatch.setattr(_ray, name, instead)
    monkeypatch.setattr(allocation, "holders_by_node", lambda _nodes: {})
    return clock


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("error", "limit"),
    [(ResourceInsufficientError, {"max_retries": 1}), (AllocationTimeoutError, {"timeout_s": 5.0})],
)
def test_a_failure_says_that_ray_grants_no_order_of_what_fits(never_granting, caplog, error, limit):
    total = {"CPU": 64.0, "GPU": 2.0}
    nodes = [NodeState(name, "10.0.0.1", total, total) for name in ("a", "b")]
    shares = [(0.4, 0.2, 0.6, 0.5), (0.7, 0.5, 0.2, 0.6)]
    bundles = tuple(tuple({"GPU": share} for share in one) for one in shares)
    request = PlacementRequest((4, 4), strategy="PACK", bundles=bundles)
    options = {
        "census": lambda label: nodes,
        "clock": lambda: never_granting.now,
        "sleep": lambda seconds: None,
    }
    with pytest.raises(error, match="in no such order do all parts of devices fit") as raised:
        Allocator(request, alias="parts", **limit, **options).allocate()
    assert "not granted yet" in raised.value.reasons[0]
    assert "in no such order" in caplog.text


@pytest.mark.parametrize("free", [0.0, 2.0])
def test_an_allocation_that_is_given_up_waits_neither_for_room_nor_for_ray(never_granting, monkeypatch, free):
    given_up, withdrawn = threading.Event(), []

    def sleep(seconds):
        never_granting.now += seconds
        given_up.set()

    def group_state(_group):
        given_up.set()
        return SimpleNamespace(state="PENDING", scheduling_state="PENDING", name="a-node0")

    monkeypatch.setattr(_ray, "autoscaler_is_running", lambda: False)
    monkeypatch.setattr(_ray, "group_state", group_state)
    monkeypatch.setattr(_ray, "withdraw_groups", withdrawn.extend)
    nodes = [NodeState("a", "10.0.0.1", {"CPU": 2.0}, {"CPU": free})]
    options = {"census": lambda label: nodes, "clock": lambda: never_granting.now, "sleep": sleep}
    allocator = Allocator(PlacementRequest((1,), {"CPU": 1.0}), alias="unwanted", **options)
    with _ray.Session.until_set(given_up), pytest.raises(asyncio.CancelledError):
        allocator.allocate()
    assert len(withdrawn) == bool(free), "nothing is left of it"
