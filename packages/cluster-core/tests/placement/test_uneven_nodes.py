"""On uneven nodes: the planner and Ray's own scheduler agree; labels, and other accelerators than GPUs."""

import os
import random

import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from watching import drain, wait_until

from raycrew.cluster_core import (
    BundleSpec,
    InfeasibleRequestError,
    PlacementRequest,
    RayVirtualCluster,
    ResourceInsufficientError,
    bind_device,
    node_states,
    plan_cluster,
)
from raycrew.cluster_core._ray.questions import group_state, withdraw_group
from raycrew.cluster_core.testing import clean_up, connected, simulated_nodes

NODES = [
    {"num_cpus": 6, "labels": {"zone": "a"}, "resources": {"NPU": 4, "TPU": 4, "disk": 4}},
    {"num_cpus": 4, "labels": {"zone": "b"}},
    {"num_cpus": 3, "labels": {"zone": "b"}},
]


REFUSALS = ("INFEASIBLE", "NO_RESOURCES")


@pytest.fixture(scope="module")
def uneven():
    with simulated_nodes(NODES) as nodes, connected(nodes.address):
        yield nodes.address


def ray_grants(counts, strategy, selector, expected):
    """Whether Ray grants groups of so many one-CPU bundles at the same time.

    A grant that is expected is waited for; a refusal is what Ray says again after a while.
    """
    groups = [
        placement_group(
            [{"CPU": 1}] * count,
            strategy=strategy,
            bundle_label_selector=[selector] * count if selector else None,
        )
        for count in counts
    ]
    try:
        if expected:
            return all(group.wait(60) for group in groups)
        for _ in range(600):
            waiting = [group for group in groups if not group.wait(0.1)]
            refused = [group_state(group).scheduling_state in REFUSALS for group in waiting]
            if all(refused):
                break
        return all(group.wait(1) for group in groups)
    finally:
        for group in groups:
            withdraw_group(group)


def our_answer(counts, strategy, selector):
    plan = plan_cluster(node_states(), PlacementRequest(counts, {"CPU": 1.0}, strategy, selector))
    return plan if plan.feasible else None


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"])
def test_single_groups(uneven, strategy):
    edges = {"STRICT_PACK": (6, 7), "PACK": (13, 14), "SPREAD": (13, 14), "STRICT_SPREAD": (3, 4)}[strategy]
    for count in (1, *edges):
        ours = our_answer((count,), strategy, {})
        assert ray_grants([count], strategy, {}, expected=ours is not None) == (ours is not None), count
        clean_up()


@pytest.mark.slow
def test_label_selectors(uneven):
    for selector in (
        {"zone": "b"},
        {"zone": "!a"},
        {"zone": "in(a,c)"},
        {"zone": "!in(a,b)"},
        {"host": "!x"},
    ):
        ours = our_answer((1,), "PACK", selector)
        assert ray_grants([1], "PACK", selector, expected=ours is not None) == (ours is not None), selector
        clean_up()


@pytest.mark.slow
def test_whatever_is_planned_is_granted_as_planned(uneven):
    """Random requests, some of them in a cluster that is already partly used; what is refused Ray refuses."""
    rng = random.Random(7)
    for _ in range(4):
        with RayVirtualCluster([rng.randint(1, 3)], use_gpus=False, timeout_s=60):
            for _ in range(3):
                counts = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
                options = {
                    "use_gpus": False,
                    "placement_group_strategy": rng.choice(
                        ["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"]
                    ),
                    "unified": rng.random() < 0.5,
                }
                _await_census()
                plan = RayVirtualCluster.plan(counts, **options)
                if not plan.feasible:
                    with pytest.raises(ResourceInsufficientError):
                        RayVirtualCluster(counts, **options, timeout_s=0)
                    strategy = options["placement_group_strategy"]
                    assert not ray_grants(counts, strategy, {}, expected=False), (counts, options)
                    continue
                with RayVirtualCluster(counts, **options) as cluster:
                    granted = [
                        node_id
                        for group in cluster.get_placement_groups()
                        for _, node_id in sorted(placement_group_table(group)["bundles_to_node_id"].items())
                    ]
                    assert granted == [bundle.node_id for bundle in cluster.bundles]


@pytest.mark.slow
def test_nodes_are_chosen_by_their_labels(uneven):
    zones = {node.node_id: node.labels["zone"] for node in node_states()}

    def lies_in(counts, **options):
        with RayVirtualCluster(counts, use_gpus=False, **options) as cluster:
            return [zones[bundle.node_id] for bundle in cluster.bundles]

    assert lies_in([1], label_selector={"zone": "in(b,c)"}) == ["b"]
    assert lies_in([4, 3], topology_strategy={"zone": "STRICT_PACK"}) == ["b"] * 7  # No single node has room.
    segments = lies_in([3, 3, 3, 3], segment_size=2, topology_strategy={"zone": "STRICT_PACK"})
    assert sorted(segments) == ["a"] * 6 + ["b"] * 6 and segments[:3] == segments[3:6]
    with pytest.raises(InfeasibleRequestError, match="2 such domains"):
        lies_in([6, 4], topology_strategy={"zone": "STRICT_PACK"})


@pytest.mark.slow
def test_each_logical_node_may_have_labels_of_its_own_and_custom_resources(uneven):
    zones = {node.node_id: node.labels["zone"] for node in node_states()}
    selectors = [{"zone": "b"}, {"zone": "a"}, None]
    specs = [BundleSpec(), BundleSpec(resources={"disk": 2}), BundleSpec(cpus=2, resources={"disk": 1})]
    with RayVirtualCluster([1, 1, 1], bundle_specs=specs, label_selector=selectors) as cluster:
        assert [zones[bundle.node_id] for bundle in cluster.bundles] == ["b", "a", "a"]
        (node,) = (node for node in node_states() if zones[node.node_id] == "a")
        assert node.free["disk"] == 1
        claim = cluster.claim([1], "keeper")
        assert claim.actor_options(0)["resources"] == {"disk": 2.0}
        holder = Holder.options(**claim.actor_options(0)).remote()
        assert ray.get(holder.binding.remote(), timeout=120).kind == "cpu"
    with pytest.raises(InfeasibleRequestError, match="labels don't fit"):
        RayVirtualCluster([1], bundle_specs=specs[1], label_selector=[{"zone": "b"}])


@ray.remote
class Holder:
    def binding(self):
        return bind_device(ray.get_runtime_context().get_accelerator_ids(), os.environ)


@pytest.mark.slow
@pytest.mark.parametrize("accelerator", ["NPU", pytest.param("TPU", marks=pytest.mark.long)])
def test_other_accelerators_are_shared_and_bound_as_gpus_are(uneven, accelerator, capsys):
    """Two groups share the devices; each worker is bound to its own device, and sees no other."""
    slots = {"NPU": 2, "TPU": 1}[accelerator]  # Ray hands TPUs out as wholes.
    with RayVirtualCluster([2], accelerator=accelerator, max_colocated_worker_groups=slots) as cluster:
        claims = [cluster.claim(None, f"group {number}") for number in range(slots)]
        workers = [Holder.options(**claim.actor_options(i)).remote() for claim in claims for i in (0, 1)]
        bindings = ray.get([worker.binding.remote() for worker in workers], timeout=120)
        assert {(one.kind, one.local_index) for one in bindings} == {(accelerator.lower(), 0)}
        devices = [one.device_index for one in bindings]
        assert devices == devices[:2] * slots and len(set(devices)) == 2 and set(devices) <= {0, 1, 2, 3}
        assert not any(one.environment for one in bindings), "Ray's own mask was not right"
        claims[0].learn(dict(enumerate(devices[:2])))
        assert [bundle.device_index for bundle in cluster.bundles] == sorted(devices[:2])
        cluster.print_cluster_grid()
        assert f"{accelerator} {min(devices)}" in capsys.readouterr().out


def _await_census():
    """Wait until what the nodes report is what the groups hold."""
    held = sum(
        len(entry["bundles"]) for entry in placement_group_table().values() if entry["state"] == "CREATED"
    )
    for _ in range(600):
        used = sum(node.total["CPU"] - node.free["CPU"] for node in node_states())
        if used == held:
            return
        ray.wait([ray.put(0)], timeout=0.05)
    raise AssertionError(f"{held} CPUs are held, the census says {used}")


@pytest.mark.hostile
@pytest.mark.slow
def test_a_node_that_is_being_drained_is_passed_over(uneven):
    """The last test: the node is drained for good."""
    small = min(node_states(), key=lambda node: node.total["CPU"]).node_id
    on_it = NodeAffinitySchedulingStrategy(small, soft=False)
    busy = Holder.options(num_cpus=1, scheduling_strategy=on_it).remote()  # An idle one leaves at once.
    ray.get(busy.binding.remote(), timeout=60)
    assert RayVirtualCluster.plan([2], use_gpus=False).node_ids == ((small,) * 2,)
    drain(small)
    wait_until(lambda: {node.node_id for node in node_states() if node.draining} == {small})
    with RayVirtualCluster([2], use_gpus=False, max_retries=0) as cluster:
        assert small not in {bundle.node_id for bundle in cluster.bundles}
