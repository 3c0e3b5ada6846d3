import asyncio
import contextlib
import os
import re
import subprocess
import sys
import textwrap
from array import array

import pytest
import ray
from watching import live_groups

from raycrew.cluster_core import (
    AllocationTimeoutError,
    BundlesOccupiedError,
    ClusterClosedError,
    InfeasibleRequestError,
    NodeCallError,
    NodeCallTimeoutError,
    RayVirtualCluster,
    ResourceInsufficientError,
    node_states,
)
from raycrew.cluster_core.testing import check_cluster


@ray.remote
class Where:
    def node(self):
        return ray.get_runtime_context().get_node_id()

    def devices(self):
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]


def test_the_default_of_gpus_on_a_machine_without_any_says_what_to_ask_for(local_ray):
    with pytest.raises(
        InfeasibleRequestError, match=r"no node has any GPU; .*use_gpus=False.* asks for none"
    ):
        RayVirtualCluster([1])


@pytest.mark.smoke
def test_a_cpu_cluster_does_what_every_cluster_does(local_ray):
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        check_cluster(cluster)
        assert (cluster.world_size(), cluster.node_count()) == (2, 1)
    with pytest.raises(ClusterClosedError):
        cluster.claim(None, "late")
    cluster.shutdown()


@pytest.mark.parametrize("unified", [pytest.param(False, marks=pytest.mark.long), True])
def test_each_logical_node_lies_on_one_node_and_the_plan_is_the_truth(ray_nodes, unified):
    planned = RayVirtualCluster.plan([4, 0, 2], unified=unified)
    with RayVirtualCluster([4, 0, 2], unified=unified, name="policy") as cluster:
        assert len(cluster.get_placement_groups()) == (1 if unified else 2)
        assert [b.node_index for b in cluster.bundles] == [0, 0, 0, 0, 2, 2]
        assert tuple(b.node_id for b in cluster.bundles) == planned.node_ids[0] + planned.node_ids[2]
        claim = cluster.claim(None, "train")
        actors = [Where.options(**claim.actor_options(i)).remote() for i in range(6)]
        nodes = ray.get([a.node.remote() for a in actors], timeout=120)
        assert nodes == [b.node_id for b in claim.bundles]
        devices = [int(one[0]) for one in ray.get([a.devices.remote() for a in actors])]
        claim.learn(dict(enumerate(devices)))
        assert [b.device_index for b in cluster.bundles][:4] == [0, 1, 2, 3]


def test_what_one_cluster_took_is_known_to_the_next_at_once(ray_nodes, caplog):
    with contextlib.ExitStack() as stack:
        clusters = [stack.enter_context(RayVirtualCluster([4])) for _ in range(3)]
        assert len({cluster.bundles[0].node_id for cluster in clusters}) == 3
    assert "attempt" not in caplog.text


def test_the_order_is_the_same_after_a_restart(ray_nodes):
    """Right after the shutdown, while nodes still show what was held as taken."""

    def order(*, devices):
        with RayVirtualCluster([1, 3, 0, 2]) as cluster:
            if devices:
                claim = cluster.claim(None, "train")
                actors = [Where.options(**claim.actor_options(i)).remote() for i in range(6)]
                found = ray.get([actor.devices.remote() for actor in actors], timeout=120)
                claim.learn({i: int(one[0]) for i, one in enumerate(found)})
                pairs = [(b.node_index, b.device_index) for b in cluster.bundles]
                assert pairs == sorted(pairs)
            return [(b.index, b.node_index, b.node_id) for b in cluster.bundles]

    orders = [order(devices=devices) for devices in (False, True, False, False)]
    assert orders == [orders[0]] * 4


@pytest.mark.hostile
def test_explanations_name_actors_and_what_nobody_answers_for(ray_nodes):
    judge = Where.options(name="judge", num_cpus=1, num_gpus=2).remote()
    others = [Where.options(num_cpus=0, num_gpus=1).remote() for _ in range(2)]
    gate = Gate.options(num_cpus=0).remote()
    task = ray.remote(num_gpus=1)(hold).remote(gate)
    ray.get([one.node.remote() for one in [judge, *others]] + [gate.entered.remote()], timeout=120)
    with RayVirtualCluster([1], name="policy"):
        while sum(node.free["GPU"] for node in node_states()) > 6:
            ray.wait([task], timeout=0.05)
        with pytest.raises(AllocationTimeoutError) as error:
            RayVirtualCluster([4, 4, 4], timeout_s=0)
    said = str(error.value)
    for who in (
        r"actor 'judge' \(1 CPU, 2 GPU\)",
        r"actors of Where \([12] GPU\)",
        r"placement group 'policy-\w+-node0' \(1 CPU, 1 GPU\)",
        r"tasks, or what was freed a moment ago \((1 CPU, )?1 GPU\)",
    ):
        assert re.search(who, said), said
    ray.get(gate.open.remote())
    ray.get(task, timeout=120)


@ray.remote
class Gate:
    def __init__(self):
        self.passed, self.inside = asyncio.Event(), asyncio.Event()

    async def enter(self):
        self.inside.set()
        await self.passed.wait()

    async def entered(self):
        await self.inside.wait()

    async def open(self):
        self.passed.set()


def hold(gate):
    ray.get(gate.enter.remote())


def test_a_full_cluster_names_who_holds_it(ray_nodes):
    with RayVirtualCluster([4, 4], name="policy"), RayVirtualCluster([4], name="policy"):
        assert len(set(live_groups())) == 3 and all(name.startswith("policy-") for name in live_groups())
        with pytest.raises(AllocationTimeoutError, match=r"held by placement group 'policy-.*4 GPU") as error:
            RayVirtualCluster([1], name="reward", timeout_s=0.5)
        assert sum("held by" in line for line in error.value.reasons) == 3
        with pytest.raises(InfeasibleRequestError, match="can never fit"):
            RayVirtualCluster([5], timeout_s=60)


def test_one_group_too_many_fails_at_once(local_ray):
    with RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=2) as cluster:
        claims = [cluster.claim(None, name) for name in ("train", "generate")]
        with pytest.raises(BundlesOccupiedError, match="train, generate"):
            cluster.claim([1], "reward")
        claims[0].release()
        reward = cluster.claim([1], "reward")
        assert cluster.holders()[1] == ("generate", "reward")
        reward.release()


def test_a_function_runs_on_each_node_and_failures_are_attributed(ray_nodes):
    def refuse_on(node):
        def fn():
            if ray.get_runtime_context().get_node_id() == node:
                raise ArithmeticError("no")
            return array("d", [1, 1, 1])

        return fn

    with RayVirtualCluster([1, 4, 4]) as cluster:
        nodes = list(dict.fromkeys(b.node_id for b in cluster.bundles))
        results = dict(cluster.run_on_each_node(lambda: array("d", [1, 1, 1])))
        assert set(results) == set(nodes)
        assert all(sum(one) == 3 for one in results.values())
        seen = []
        with pytest.raises(NodeCallError, match=r"ArithmeticError\('no'\)") as error:
            for node_id, _ in cluster.run_on_each_node(refuse_on(nodes[0])):
                seen.append(node_id)
        assert error.value.node_id == nodes[0]
        assert isinstance(error.value.__cause__, ArithmeticError)
        assert sorted(seen) == sorted(nodes[1:])


@pytest.mark.hostile
def test_nodes_that_are_late_are_each_named(ray_nodes):
    gate = Gate.options(num_cpus=0).remote()
    with RayVirtualCluster([4, 4, 4]) as cluster:
        nodes = {bundle.node_id for bundle in cluster.bundles}
        with pytest.raises(ExceptionGroup, match="failed on 3 nodes") as error:
            list(cluster.run_on_each_node(lambda: ray.get(gate.enter.remote()), timeout_s=0.5))
        assert all(isinstance(one, NodeCallTimeoutError) for one in error.value.exceptions)
        assert {one.node_id for one in error.value.exceptions} == nodes
        assert "within 0.5 s" in str(error.value.exceptions[0])


def test_ports_are_leased_on_the_bundles_node(ray_nodes):
    with RayVirtualCluster([4, 4], port_range=(24000, 24100)) as cluster:
        addresses = cluster.get_available_addresses_and_ports([(g, b) for g in range(2) for b in range(4)])
        ports = [port for _, port in addresses]
        assert len({*ports, cluster.get_master_address_and_port()[1]}) == 9
        assert all(24000 <= port <= 24100 for port in ports)
        block = cluster.rendezvous(0, 4, consecutive=True)
        assert list(block.ports) == list(range(block.port, block.port + 4))
        with pytest.raises(ValueError, match="no bundle 4"):
            cluster.get_available_address_and_port(0, 4)


@pytest.fixture
def devices_of(ray_nodes):
    def devices(cluster):
        claim = cluster.claim(None, "look")
        actors = [Where.options(**claim.actor_options(i)).remote() for i in range(len(claim.bundles))]
        found = [int(one[0]) for one in ray.get([a.devices.remote() for a in actors], timeout=120)]
        claim.release()
        return found

    return devices


@pytest.mark.long  # in short: test_auto_learns_what_was_granted, test_a_device_of_somebody_else_is_never_used
def test_particular_devices_are_granted_and_the_others_stay_free(ray_nodes, devices_of):
    with RayVirtualCluster([2, 2], gpu_ids=[[1, 3], [0, 2]], name="pinned") as cluster:
        assert sorted((b.node_index, b.device_index) for b in cluster.bundles) == [
            (0, 1),
            (0, 3),
            (1, 0),
            (1, 2),
        ]
        assert devices_of(cluster) == [1, 3, 0, 2]
        with RayVirtualCluster([2, 2], gpu_ids=[0, 2]) as other:  # Taken devices make it go elsewhere.
            assert {b.node_id for b in other.bundles}.isdisjoint(
                b.node_id for b in cluster.bundles if b.node_index == 1
            )
        with RayVirtualCluster([4, 2, 2], unified=True, timeout_s=60):  # Nothing else is held.
            pass


@pytest.mark.hostile
def test_a_device_of_somebody_else_is_never_used(ray_nodes):
    with RayVirtualCluster([1, 1], gpu_ids=[2], placement_group_strategy="STRICT_PACK") as cluster:
        assert len({b.node_id for b in cluster.bundles}) == 2  # The second device 2 is of another node.
        there = {"ray.io/node-id": cluster.bundles[0].node_id}
        with pytest.raises(
            ResourceInsufficientError, match=r"devices \[2\] of node \w+ are not free, \[0, 1, 3\] are"
        ):
            RayVirtualCluster([1], gpu_ids=[2], label_selector=there, max_retries=0, timeout_s=60)
        assert len(live_groups()) == 2, "something is still held"


def test_auto_learns_what_was_granted(ray_nodes, devices_of):
    with RayVirtualCluster([4], gpu_ids="auto") as cluster:
        assert [b.device_index for b in cluster.bundles] == [0, 1, 2, 3]
        assert devices_of(cluster) == [0, 1, 2, 3]


def test_a_claim_on_some_bundles_is_in_device_order(ray_nodes):
    with RayVirtualCluster([4, 4], max_colocated_worker_groups=2) as cluster:
        assert {b.device_index for b in cluster.bundles} == {None}
        claim = cluster.claim([1, 2], "some")
        assert [b.device_index for b in claim.bundles] == [1, 2]
        assert [b.device_index for b in cluster.bundles] == [0, 1, 2, 3] + [None] * 4
        actor = Where.options(**claim.actor_options(1)).remote()
        assert ray.get(actor.devices.remote(), timeout=120) == ["2"]


@ray.remote
class Controller:
    """A process that was handed the cluster."""

    def claim(self, cluster, holder):
        self.cluster = cluster
        self.held = cluster.claim(None, holder)
        return cluster.rendezvous().port

    def leave(self):
        self.held.release()
        self.cluster.shutdown()


def test_copies_in_other_processes_share_the_slots(local_ray):
    with RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=2, name="shared") as cluster:
        mine = cluster.claim(None, "mine")
        controller = Controller.options(num_cpus=0).remote()
        port = ray.get(controller.claim.remote(cluster, "theirs"), timeout=120)
        assert port != cluster.rendezvous().port
        with pytest.raises(BundlesOccupiedError, match="held by bundle 0: mine, theirs"):
            cluster.claim([0], "third")
        with pytest.raises(BundlesOccupiedError):
            ray.get(controller.claim.remote(cluster, "fourth"), timeout=120)
        ray.get(controller.leave.remote(), timeout=120)
        assert cluster.holders() == {0: ("mine",), 1: ("mine",)}
        ray.get(controller.claim.remote(cluster, "theirs"), timeout=120)
        assert cluster.release_holder("theirs") == 1
        mine.release()
        assert cluster.holders() == {}


@pytest.mark.hostile
def test_what_a_dead_actor_held_is_free_again(local_ray):
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        controller = Controller.options(num_cpus=0).remote()
        ray.get(controller.claim.remote(cluster, "theirs"), timeout=120)
        with pytest.raises(BundlesOccupiedError, match="theirs"):
            cluster.claim([1], "mine")
        ray.kill(controller)
        claim = claim_in_time(cluster, "mine")
        assert cluster.holders() == {0: ("mine",), 1: ("mine",)}
        claim.release()


@ray.remote(num_cpus=0, max_retries=0)
def claim_and_die(cluster):
    cluster.claim([0], "a task")
    os._exit(1)


KEPT = []


@ray.remote(num_cpus=0, max_retries=0)
def claim_and_keep(cluster):
    """The task ends, and its worker's process lives on."""
    KEPT.append(cluster.claim([1], "a living worker"))


@pytest.mark.hostile
def test_what_a_dead_task_held_is_free_again(local_ray):
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        with pytest.raises(ray.exceptions.WorkerCrashedError):
            ray.get(claim_and_die.remote(cluster), timeout=120)
        claim_in_time(cluster, "mine").release()
        ray.get(claim_and_keep.remote(cluster), timeout=120)
        assert cluster.holders() == {1: ("a living worker",)}
        assert cluster.release_holder("a living worker") == 1
        cluster.claim(None, "mine").release()


def claim_in_time(cluster, holder):
    """Ray learns of a death a moment later."""
    for _ in range(600):
        try:
            return cluster.claim(None, holder)
        except BundlesOccupiedError:
            ray.wait([ray.put(0), ray.put(1)], num_returns=2, timeout=0.1)
    raise AssertionError(f"still held: {cluster.holders()}")


DRIVER = """
    import sys, ray
    ray.init(address=sys.argv[1], namespace="shared", log_to_driver=False)
    cluster = ray.get(ray.get_actor("post").take.remote())
    claim = cluster.claim(None, "other driver")
    print("ready", flush=True)
    sys.stdin.readline()
"""


@ray.remote
class Post:
    """Hands a cluster on to a driver that it has no other connection to."""

    def leave(self, cluster):
        self.cluster = cluster

    def take(self):
        return self.cluster


@pytest.mark.hostile
def test_what_a_dead_driver_held_is_free_again(local_ray):
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        post = Post.options(name="post", namespace="shared", num_cpus=0).remote()
        ray.get(post.leave.remote(cluster), timeout=120)
        driver = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(DRIVER), local_ray],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert driver.stdout.readline() == "ready\n"
            with pytest.raises(BundlesOccupiedError, match="other driver"):
                cluster.claim(None, "mine")
        finally:
            driver.kill()
            driver.communicate(timeout=60)
        claim_in_time(cluster, "mine").release()


def test_it_draws_itself(local_ray, capsys):
    with RayVirtualCluster([2], use_gpus=False, name="drawn") as cluster:
        cluster.print_cluster_grid()
        assert "drawn" in capsys.readouterr().out
        assert cluster.layout_svg([]).startswith("<svg")
        assert "<svg" in cluster._repr_html_()
    assert "shut down" in cluster._repr_html_()


def test_memory_of_each_bundle_is_watched(local_ray):
    with RayVirtualCluster([2], use_gpus=False, monitor_memory=True) as cluster:
        assert [one.bundle_index for one in cluster.memory_usage()] == [0, 1]
        assert cluster.memory_monitor.read()
        assert set(cluster.memory_monitor.high_water) == {0, 1}
