"""What happens when things go wrong under real clusters: drivers and nodes die, groups vanish."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from dataclasses import replace

import pytest
import ray
from ray import cluster_utils
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from watching import drain, live_groups, wait_until

from raycrew.cluster_core import (
    AllocationTimeoutError,
    BundlesLostError,
    ClusterError,
    InfeasibleRequestError,
    NodeLostError,
    PlacementRequest,
    RayVirtualCluster,
    ResourceInsufficientError,
    _ray,
    node_states,
    plan_cluster,
)
from raycrew.cluster_core.__main__ import main
from raycrew.cluster_core._placement import allocation as _allocation
from raycrew.cluster_core._ray import gate as _gate
from raycrew.cluster_core._ray import questions as _questions
from raycrew.cluster_core._ray import status as _ray_status
from raycrew.cluster_core.memory import MemoryMonitor
from raycrew.cluster_core.testing import _nodes, connected, simulated_nodes


def wait_until_all_is_free():
    wait_until(lambda: all(n.free["CPU"] == n.total["CPU"] for n in node_states()))


def test_without_ray_it_says_so_and_starts_none():
    ray.shutdown()
    with pytest.raises(ClusterError, match=r"call init_ray\(\) first"):
        RayVirtualCluster([1], use_gpus=False)
    assert not ray.is_initialized()


def test_an_exception_while_groups_are_made_leaves_nothing(ray_nodes, monkeypatch):
    create, made = _questions.create_group, []

    def fail_the_second(*arguments):
        if made:
            raise KeyboardInterrupt
        made.append(create(*arguments))
        return made[0]

    monkeypatch.setattr(_ray, "create_group", fail_the_second)
    with pytest.raises(KeyboardInterrupt):
        RayVirtualCluster([2, 2])
    assert not live_groups()
    wait_until_all_is_free()  # Ray loses what a group holds if it is removed while it is being placed.


def test_an_exception_after_the_groups_are_granted_leaves_nothing(local_ray, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(MemoryMonitor, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        RayVirtualCluster([2, 2], use_gpus=False, monitor_memory=True)
    assert not live_groups()


def test_a_group_that_is_removed_while_it_is_waited_for_is_made_again(ray_nodes, monkeypatch):
    create, names = _questions.create_group, []

    def remove_the_first(*arguments):
        group = create(*arguments)
        names.append(arguments[2])
        if len(names) == 1:
            assert _questions.await_group(group, 60)
            _questions.remove_group(group)
        return group

    monkeypatch.setattr(_ray, "create_group", remove_the_first)
    with RayVirtualCluster([2, 2]) as cluster:
        assert len(cluster.bundles) == 4
        assert names[-1].endswith("-try2")
        wait_until(lambda: len(live_groups()) == 2)


def test_a_lost_race_is_planned_anew(ray_nodes, monkeypatch):
    """The census says that a node is free, and somebody else takes it before the groups are made."""
    with RayVirtualCluster([4], name="rival") as rival:
        taken = rival.bundles[0].node_id
        monkeypatch.setattr(_allocation, "_FIRST_WINDOW_S", 0.5)
        stale = [node for node in node_states() if node.node_id == taken]
        looks = []

        def census(domain_label):
            looks.append(domain_label)
            fresh = node_states(domain_label)
            empty = [type(n)(n.node_id, n.address, n.total, n.total, n.labels) for n in stale]
            return [*empty, *(n for n in fresh if n.node_id != taken)] if len(looks) == 1 else fresh

        allocator = _allocation.Allocator(
            _request((4,)), alias="late", timeout_s=60, max_retries=2, census=census
        )
        allocation = allocator.allocate()
        assert allocation.seats[0].node_id != taken
        allocation.remove()


def test_a_control_service_that_does_not_answer_is_asked_again_until_the_deadline(ray_nodes):
    looks = []

    def census(domain_label):
        looks.append(domain_label)
        if len(looks) == 1:
            raise GetTimeoutError("no answer")
        return node_states(domain_label)

    _allocation.Allocator(_request((2,)), alias="patient", census=census).allocate().remove()

    def silent(_):
        raise GetTimeoutError("no answer")

    with pytest.raises(AllocationTimeoutError, match="GetTimeoutError: no answer"):
        _allocation.Allocator(_request((2,)), alias="silent", timeout_s=0, census=silent).allocate()
    with pytest.raises(ResourceInsufficientError, match=r"3 attempts.*\n.*no answer"):
        _allocation.Allocator(_request((2,)), alias="silent", max_retries=2, census=silent).allocate()


def _request(counts):
    from raycrew.cluster_core import PlacementRequest

    return PlacementRequest(counts)


def test_what_can_never_fit_fails_at_once_and_leaves_nothing(ray_nodes):
    for arguments in ({"bundle_ct_per_node_list": [4, 4, 4, 1]}, {"bundle_ct_per_node_list": [5]}):
        with pytest.raises(InfeasibleRequestError, match="can never fit") as error:
            RayVirtualCluster(**arguments, timeout_s=3000)
        assert "room for 4 of 4" in str(error.value)
    assert "STRICT_PACK keeps the 5 bundles of a logical node on one physical node" in str(error.value)
    assert "the counts [3, 2] or placement_group_strategy='PACK' would fit" in str(error.value)
    with pytest.raises(InfeasibleRequestError, match=r"the counts \[4, 3, 3\] or .*'PACK' would fit"):
        RayVirtualCluster([10], timeout_s=3000)
    with pytest.raises(ValueError, match="STRICT_PACK keeps them on one physical node"):
        RayVirtualCluster([10], num_gpus_per_node=4)
    with RayVirtualCluster([10], placement_group_strategy="PACK", num_gpus_per_node=4) as cluster:
        assert cluster.world_size() == 10
    with pytest.raises(InfeasibleRequestError, match="labels don't fit"):
        RayVirtualCluster([1], label_selector={"zone": "nowhere"}, timeout_s=3000)
    assert not live_groups()


def test_an_autoscaler_that_has_not_told_of_itself_is_waited_for(ray_nodes, monkeypatch):
    answers = iter([None, None, False])
    monkeypatch.setattr(_ray, "autoscaler_is_running", lambda: next(answers))
    with pytest.raises(InfeasibleRequestError):
        RayVirtualCluster([5], timeout_s=3000)
    assert not list(answers)
    monkeypatch.setattr(_ray, "autoscaler_is_running", lambda: None)
    with pytest.raises(InfeasibleRequestError):
        RayVirtualCluster([5], timeout_s=0)


def test_a_full_cluster_is_waited_for_until_it_is_free(ray_nodes):
    first = RayVirtualCluster([4, 4, 4])
    first.shutdown()  # Its resources come back a moment later.
    with RayVirtualCluster([4, 4, 4], timeout_s=120) as second:
        assert second.world_size() == 12
        with pytest.raises(AllocationTimeoutError):
            RayVirtualCluster([1], timeout_s=0)


DRIVER = """
import sys, time, ray
from raycrew.cluster_core import RayVirtualCluster
ray.init(address=sys.argv[1], log_to_driver=False)
cluster = RayVirtualCluster([4, 2], name="orphan", port_range=(7400, 7469))
ports = cluster.rendezvous(n_ports=32).ports
ray.put(cluster)  # From now on an actor keeps its slots.
cluster.holders()
ray.get(ray.util.placement_group([{"CPU": 1}], name="detached", lifetime="detached").ready())
print("ready", *ports, flush=True)
time.sleep(600)
"""


def test_a_killed_driver_leaves_nothing(ray_nodes):
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER), ray_nodes], stdout=subprocess.PIPE, text=True
    )
    try:
        ready, *ports = driver.stdout.readline().split()
        assert ready == "ready" and len(live_groups()) == 3
        actors = sorted(actor.class_name for actor in _ray_status.actor_states())
        assert actors == ["LedgerKeeper", "PortKeeper"]
        with RayVirtualCluster([1], port_range=(7400, 7469)) as other:
            assert len({*map(int, ports), *other.rendezvous(n_ports=32).ports}) == 64
        with pytest.raises(AllocationTimeoutError, match="held by placement group 'orphan-"):
            RayVirtualCluster([4, 4, 4], timeout_s=1)
        os.kill(driver.pid, signal.SIGKILL)
    finally:
        driver.kill()
        driver.wait()
    with RayVirtualCluster([4, 4, 4], timeout_s=120):
        assert not [name for name in live_groups() if name.startswith("orphan")]
    wait_until(lambda: not _ray_status.actor_states())
    left = _ray_status.leftover_groups()
    assert len(left) == 1 and left[0].startswith("detached (namespace ")
    with RayVirtualCluster([1], port_range=(7400, 7469)) as other:
        assert len(other.rendezvous(n_ports=64).ports) == 64


@contextlib.contextmanager
def stopped(process):
    """A process that stands still for a while."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def questions():
    return [thread for thread in threading.enumerate() if thread.name == "raycrew-answer"]


@pytest.fixture(scope="module")
def small_cluster():
    ray.shutdown()
    with simulated_nodes([{"num_cpus": 2}]) as nodes:
        yield nodes


@pytest.fixture
def control_service(small_cluster, monkeypatch):
    """Its process, of a cluster that this process is connected to; questions to it are given up early."""
    with connected(small_cluster.address):
        (server,) = small_cluster.head_node.all_processes["gcs_server"]
        monkeypatch.setattr(_gate, "_ANSWER_S", 0.5)
        yield server.process
        monkeypatch.undo()


@pytest.mark.smoke
def test_nodes_are_started_one_at_a_time_also_those_that_are_added_later(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def add_node(_cluster, **_options):
        (path,) = tmp_path.iterdir()
        with path.open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return "added"

    monkeypatch.setattr(cluster_utils.Cluster, "add_node", add_node)
    nodes = _nodes.no_nodes()
    assert [nodes.add_node(num_cpus=1), nodes.add_node(num_cpus=2)] == ["added", "added"]


@pytest.mark.slow
@pytest.mark.hostile
def test_a_control_service_that_hangs_does_not_hang_an_allocation(control_service, monkeypatch):
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        with stopped(control_service):
            with pytest.raises(AllocationTimeoutError, match="control service did not answer"):
                RayVirtualCluster([1], use_gpus=False, timeout_s=1)
            with pytest.raises(GetTimeoutError):
                cluster.check_nodes()
        wait_until(lambda: not questions())
        cluster.check_nodes()


@pytest.mark.slow
@pytest.mark.hostile
def test_a_control_service_that_stops_while_groups_are_made_leaves_none(control_service, monkeypatch):
    make, names = _questions.placement_group, []

    def stop_at_the_second(bundles, **options):
        names.append(options["name"])
        if len(names) == 2:
            control_service.send_signal(signal.SIGSTOP)
        return make(bundles, **options)

    monkeypatch.setattr(_questions, "placement_group", stop_at_the_second)
    try:
        with pytest.raises(AllocationTimeoutError, match="control service did not answer"):
            RayVirtualCluster([1, 1], use_gpus=False, timeout_s=1)
    finally:
        control_service.send_signal(signal.SIGCONT)
    assert len(names) == 2 == len(set(names))
    wait_until(lambda: not questions())
    made = {entry["name"]: entry["state"] for entry in placement_group_table().values()}
    assert {made[name] for name in names} == {"REMOVED"}, "the given-up group was made, and removed"
    assert not live_groups()
    wait_until_all_is_free()


@pytest.mark.slow
@pytest.mark.hostile
def test_a_control_service_that_hangs_does_not_hang_a_function_for_each_node(control_service, monkeypatch):
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        with stopped(control_service), pytest.raises(GetTimeoutError, match="did not answer within"):
            cluster.run_on_each_node(os.getpid)
        monkeypatch.undo()
        assert len(list(cluster.run_on_each_node(os.getpid))) == 1


@pytest.mark.slow
@pytest.mark.hostile
def test_a_control_service_that_hangs_does_not_hang_a_shutdown(control_service, caplog):
    cluster = RayVirtualCluster([1], use_gpus=False)
    cluster.rendezvous()
    ray.put(cluster)  # An actor keeps its slots from now on.
    with stopped(control_service):
        cluster.shutdown()
        assert "goes back once Ray's control service goes on" in caplog.text
        cluster.shutdown()
    wait_until(lambda: not questions())
    assert not live_groups()
    wait_until(lambda: not _ray_status.actor_states())
    wait_until_all_is_free()


@pytest.mark.hostile
def test_a_group_that_is_removed_under_a_live_cluster_is_noticed(local_ray):
    with RayVirtualCluster([1, 2], use_gpus=False) as cluster:
        early = cluster.claim([0], "early")
        theirs = cluster.claim([2], "theirs")
        _questions.remove_group(cluster.get_placement_groups()[1])
        wait_until(lambda: len(live_groups()) == 1)
        early.check()
        early.release()
        cluster.claim([0], "as good as before").release()
        with pytest.raises(BundlesLostError):
            theirs.check()
        theirs.release()
        for use in (cluster.check_nodes, lambda: cluster.claim(None, "late")):
            with pytest.raises(
                BundlesLostError, match=r"removed by somebody else.*bundles \[1, 2\]"
            ) as error:
                use()
            assert error.value.bundle_indices == (1, 2)


@ray.remote
class Holder:
    def ping(self):
        return None


@pytest.mark.long
@pytest.mark.slow
def test_nothing_is_placed_on_a_node_that_is_being_drained(capsys, caplog):
    ray.shutdown()
    with simulated_nodes([{"num_cpus": 8}, {"num_cpus": 4}]) as nodes, connected(nodes.address):
        large, small = (node["NodeID"] for node in sorted(ray.nodes(), key=lambda n: -n["Resources"]["CPU"]))
        on_it = NodeAffinitySchedulingStrategy(small, soft=False)
        busy = Holder.options(num_cpus=1, scheduling_strategy=on_it).remote()  # An idle one leaves at once.
        ray.get(busy.ping.remote(), timeout=60)
        assert RayVirtualCluster.plan([3], use_gpus=False).node_ids == ((small,) * 3,)
        drain(small)
        wait_until(lambda: {node.node_id for node in node_states() if node.draining} == {small})
        with caplog.at_level("WARNING"), RayVirtualCluster([3], use_gpus=False, max_retries=0) as cluster:
            assert {bundle.node_id for bundle in cluster.bundles} == {large}
        said = [record.message for record in caplog.records if record.name.startswith("raycrew.")]
        assert said == [], "it was known before the first attempt"
        request = PlacementRequest((3,), {"CPU": 1})
        assert plan_cluster(node_states(), request).node_ids == ((large,) * 3,)
        assert main(["status", "--address", nodes.address]) == 0
        assert capsys.readouterr().out.count("draining") == 1
        with RayVirtualCluster([3], use_gpus=False, timeout_s=60) as cluster:
            assert {bundle.node_id for bundle in cluster.bundles} == {large}
            with pytest.raises(InfeasibleRequestError, match="takes nothing new, as it is being drained"):
                RayVirtualCluster([8, 3], use_gpus=False, timeout_s=60)


@pytest.mark.hostile
def test_a_drained_node_is_known_before_the_first_attempt(local_ray, monkeypatch):
    (node,) = node_states()
    monkeypatch.setattr(_questions, "draining_node_ids", lambda: {node.node_id})
    monkeypatch.setattr(_allocation.Allocator, "_grant", lambda *_: pytest.fail("it was tried"))
    with pytest.raises(InfeasibleRequestError, match="takes nothing new, as it is being drained"):
        RayVirtualCluster([1], use_gpus=False)


@pytest.mark.hostile
def test_a_node_that_is_gone_from_under_a_live_cluster_is_named(ray_nodes, monkeypatch):
    """As Ray tells of it: no node is killed here."""
    with RayVirtualCluster([4, 4]) as cluster:
        gone = cluster.bundles[4].node_id
        claims = [cluster.claim([0, 1], "here"), cluster.claim([4], "there")]
        live = _ray.live_node_ids
        monkeypatch.setattr(_ray, "live_node_ids", lambda: live() - {gone})
        with pytest.raises(NodeLostError, match="lost 4 of 8 bundles") as error:
            cluster.claim(None, "late")
        assert error.value.node_ids == (gone,)
        claims[0].check()  # Its node is there.
        with pytest.raises(NodeLostError):
            claims[1].check()
        claims[0].release()
        cluster.claim([1, 0], "as good as before").release()


@pytest.mark.long
@pytest.mark.slow
def test_a_node_killed_under_a_live_cluster_is_named():
    ray.shutdown()
    with (
        simulated_nodes(
            [{"num_cpus": 2}, {"num_cpus": 2, "num_gpus": 2}, {"num_cpus": 2, "num_gpus": 2}]
        ) as nodes,
        connected(nodes.address),
    ):
        before, cluster = node_states(), RayVirtualCluster([2, 2])
        cluster_nodes = list(dict.fromkeys(bundle.node_id for bundle in cluster.bundles))
        victim = next(node for node in nodes.worker_nodes if node.node_id == cluster_nodes[1])
        claims = [cluster.claim([0, 1], "here"), cluster.claim([2], "there")]
        nodes.remove_node(victim, allow_graceful=False)
        wait_until(lambda: victim.node_id not in _questions.live_node_ids())
        with pytest.raises(NodeLostError, match="lost 2 of 4 bundles") as error:
            cluster.claim(None, "late")
        assert error.value.node_ids == (victim.node_id,)
        with pytest.raises(NodeLostError):
            cluster.rendezvous(2)
        claims[0].check()  # Its node is there.
        with pytest.raises(NodeLostError):
            claims[1].check()
        claims[0].release()
        cluster.claim([1, 0], "as good as before").release()
        left = dict(cluster.run_on_each_node(lambda: 1, timeout_s=60))
        assert left == {cluster_nodes[0]: 1}
        cluster.shutdown()
        looks = iter([[replace(node, free=node.total) for node in before if node.node_id == victim.node_id]])
        allocator = _allocation.Allocator(
            _request((2,)),
            alias="late",
            timeout_s=120,
            census=lambda label: next(looks, None) or node_states(label),
        )  # Planned on the node that is gone, then anew.
        allocation = allocator.allocate()
        assert {seat.node_id for seat in allocation.seats} == {cluster_nodes[0]}
        allocation.remove()
        with pytest.raises(InfeasibleRequestError):
            RayVirtualCluster([2, 2])
