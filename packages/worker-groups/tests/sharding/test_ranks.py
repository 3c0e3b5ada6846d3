import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycrew.cluster_core import Bundle, BundleSpec
from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import RankInfo
from raycrew.worker_groups.sharding._ranks import (
    WorkerFacts,
    assign_ranks,
    final_indices,
    plan_seats,
    rank_environment,
    rank_order,
)


def bundles(*counts):
    nodes = [node for node, count in enumerate(counts) for _ in range(count)]
    return [Bundle(i, node, f"node{node}", f"10.0.0.{node}") for i, node in enumerate(nodes)]


def facts(nodes_and_devices):
    return [
        WorkerFacts(f"node{n}", f"10.0.0.{n}", pid=i, device_index=d, master_port=5000 + i, ports=(6000 + i,))
        for i, (n, d) in enumerate(nodes_and_devices)
    ]


def ranked(cluster, devices=None, **layout):
    """Ranks of one more group, whose workers find these devices, or those that the cluster knows."""
    plan = plan_seats(cluster.bundles, **layout)
    claim = cluster.claim(plan.indices, "g")
    held = [bundle.device_index for bundle in claim.bundles] if devices is None else devices
    found = facts(zip([bundle.node_index for bundle in claim.bundles], held, strict=True))
    settled = final_indices(claim, found)
    return assign_ranks(rank_order(plan, settled), found, settled, "g")


def devices_and_bundles(infos):
    return [(info.device_index, info.bundle_index) for info in infos]


def mixed(*gpus, slots=1):
    """A cluster of one logical node."""
    specs = [BundleSpec(gpus=n) for n in gpus]
    return FakeCluster([len(gpus)], bundle_specs=[specs], max_colocated_worker_groups=slots)


def indices(plan):
    return [seat.bundle.index for seat in plan.seats]


@pytest.mark.smoke
def test_one_worker_per_bundle_claims_all_in_whatever_order():
    plan = plan_seats(bundles(2, 0, 1))
    assert (indices(plan), plan.indices, plan.ordered) == ([0, 1, 2], None, False)
    assert plan.tied_groups == [[0], [1], [2]]


def test_the_last_bundles_are_spare_where_nothing_says_who_is_where():
    plan = plan_seats(bundles(2, 0, 2), n_spare=1)
    assert (plan.indices, plan.ordered) == ((0, 1, 2), False)
    assert plan_seats(bundles(2, 2), [1, 1], n_spare=2).indices == (0, 2)
    assert plan_seats(bundles(2, 2), None, [[3], [0]], n_spare=2).indices == (3, 0)


@pytest.mark.parametrize(
    ("asked", "chosen"), [(1, [0, 4]), ([2, 1], [0, 1, 4]), ([0, 2], [4, 5]), ([4, 2], None)]
)
def test_workers_per_node(asked, chosen):
    plan = plan_seats(bundles(4, 2), workers_per_node=asked)
    assert plan.indices == (None if chosen is None else tuple(chosen))


def test_an_argument_of_the_workers_own_is_no_number_of_workers():
    with pytest.raises(TypeError, match="and no object; what a worker's __init__ takes is given by name"):
        plan_seats(bundles(4, 2), workers_per_node=object())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers_per_node": 3}, "node 1 has 2 bundle"),
        ({"workers_per_node": -1}, "no room for -1"),
        ({"workers_per_node": [1]}, "1 entries for 2 node"),
        ({"workers_per_node": [1, 1, 1]}, "3 entries for 2 node"),
        ({"workers_per_node": 0}, "no worker at all"),
        ({"workers_per_node": 1, "bundle_indices_list": [[0]]}, "not both"),
        ({"n_spare": 7}, r"all 6 bundle\(s\) of the cluster are to be spare"),
        ({"n_spare": 6}, r"all 6 bundle\(s\) of the cluster are to be spare"),
        ({"n_spare": 1, "bundle_indices_list": [[0], [1, 2], [3, 4]]}, r"not tied; \[1, 2\] are"),
        ({"bundle_indices_list": []}, "is empty"),
        ({"bundle_indices_list": [(0, [])]}, "names no bundle"),
        ({"bundle_indices_list": [(0, [4])]}, "node 0 has no bundle 4"),
        ({"bundle_indices_list": [[6]]}, "the cluster has no bundle 6"),
        ({"bundle_indices_list": [[7]]}, "the cluster has no bundle 7"),
        ({"bundle_indices_list": [[-1]]}, "the cluster has no bundle -1"),
        ({"bundle_indices_list": [(2, [0])]}, "no node 2 among 2"),
        ({"bundle_indices_list": [(1, [0]), [4]]}, r"bundle\(s\) \[4\] more than once"),
        ({"bundle_indices_list": [[0], [1], [0]]}, r"bundle\(s\) \[0\] more than once"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_seats(bundles(4, 2), **arguments)


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers_per_node": True}, "workers_per_node is a whole number, not True"),
        ({"workers_per_node": [1, 0.5]}, "workers_per_node is a whole number, not 0.5"),
        ({"workers_per_node": "11"}, "workers_per_node is a whole number, not '1'"),
        ({"bundle_indices_list": [[0.9]]}, "a bundle index is a whole number, not 0.9"),
        ({"bundle_indices_list": [(0, [True])]}, "a bundle index is a whole number, not True"),
        ({"bundle_indices_list": [(0, ["1"])]}, "a bundle index is a whole number, not '1'"),
        ({"bundle_indices_list": [(True, [0])]}, "a node is a whole number, not True"),
    ],
)
def test_numbers_that_are_none_are_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        plan_seats(bundles(4, 2), **arguments)


def test_tied_groups_keep_their_order_and_tell_their_leaders():
    plan = plan_seats(bundles(2, 0, 2), bundle_indices_list=[(1, [1, 0]), [0], (0, [1])])
    assert (indices(plan), plan.indices, plan.ordered) == ([3, 2, 0, 1], (3, 2, 0, 1), True)
    assert plan.tied_groups == [[0, 1], [2], [3]]
    assert [seat.tied_bundles for seat in plan.seats] == [(1, [1, 0]), None, (0, [0]), (0, [1])]


def test_a_tied_group_may_span_nodes():
    plan = plan_seats(bundles(2, 2), bundle_indices_list=[[0, 1, 2, 3]])
    assert plan.tied_groups == [[0, 1, 2, 3]]


def test_ranks_follow_node_and_device():
    infos = ranked(FakeCluster([3, 2], use_gpus=True), [2, 0, 1, 5, 4])
    assert [info.ports[0] - 6000 for info in infos] == [1, 2, 0, 4, 3]
    assert devices_and_bundles(infos) == [(0, 0), (1, 1), (2, 2), (4, 3), (5, 4)]
    half_known = ranked(FakeCluster([3, 2], use_gpus=True), [2, None, 1, 5, 4])
    assert [info.ports[0] - 6000 for info in half_known] == [0, 1, 2, 4, 3]


def test_ranks_follow_the_order_that_was_asked_for():
    infos = ranked(FakeCluster([2, 1], use_gpus=True), [3, 7, 0], bundle_indices_list=[[2], [1, 0]])
    assert [info.ports[0] - 6000 for info in infos] == [0, 1, 2]


def test_a_bundle_without_a_device_leaves_the_ranks_of_two_groups_on_the_same_devices():
    cluster = mixed(1, 1, 0, slots=2)
    trainer, generator = ranked(cluster, [1, 0, None]), ranked(cluster)
    assert devices_and_bundles(trainer) == devices_and_bundles(generator) == [(0, 0), (1, 1), (None, 2)]


def test_ranks_of_bundles_that_differ_keep_the_order_of_the_bundles():
    cluster = mixed(1, 2)
    assert devices_and_bundles(ranked(cluster, [2, 0])) == [(2, 0), (0, 1)]
    assert [bundle.device_index for bundle in cluster.bundles] == [2, 0]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.data())
def test_rank_and_bundle_agree_for_every_group(gpus, data):
    cluster = mixed(*gpus)
    devices = data.draw(st.permutations(range(len(gpus))))
    first = ranked(cluster, [d if n else None for d, n in zip(devices, gpus, strict=True)])
    assert [info.bundle_index for info in first] == list(range(len(gpus)))
    assert [info.device_index for info in first] == [bundle.device_index for bundle in cluster.bundles]


def test_two_logical_nodes_on_one_machine_count_as_one_node():
    found = facts([(0, 0), (0, 1), (0, 2), (0, 3)])
    infos = assign_ranks([0, 1, 2, 3], found, [0, 1, 2, 3], "g")
    assert [(i.node_rank, i.local_rank, i.local_world_size) for i in infos] == [(0, r, 4) for r in range(4)]


def test_rank_zero_is_the_master():
    infos = assign_ranks([2, 0, 1], facts([(0, 0), (1, 0), (1, 1)]), [0, 1, 2], "g", generation=3)
    assert {(i.master_address, i.master_port, i.generation) for i in infos} == {("10.0.0.1", 5002, 3)}
    assert [(i.rank, i.bundle_index, i.ports) for i in infos] == [
        (0, 2, (6002,)),
        (1, 0, (6000,)),
        (2, 1, (6001,)),
    ]
    assert [(i.node_rank, i.local_rank) for i in infos] == [(0, 0), (1, 0), (0, 1)]


def test_a_group_begins_with_generation_0():
    infos = assign_ranks([0], facts([(0, 0)]), [0], "g")
    assert [info.generation for info in infos] == [0]
    assert RankInfo(3, 8, 1, 2, 1, "n", "10.0.0.1", 3, None, "10.0.0.0", 29500, (), "g").generation == 0


def test_the_environment_is_that_of_launchers():
    info = RankInfo(3, 8, 1, 2, 1, "n", "10.0.0.1", 3, None, "10.0.0.0", 29500, (1, 2), "g")
    assert rank_environment(info) == {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "10.0.0.0",
        "MASTER_PORT": "29500",
        "RAYCREW_PORTS": "1,2",
    }


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any), st.randoms())
def test_local_ranks_are_dense_on_every_node(counts, random):
    cluster = FakeCluster(counts, use_gpus=True)
    devices = list(range(len(cluster.bundles)))
    random.shuffle(devices)
    infos = ranked(cluster, devices)
    assert [i.rank for i in infos] == list(range(len(infos)))
    for node in {i.node_id for i in infos}:
        here = [i for i in infos if i.node_id == node]
        assert [i.local_rank for i in here] == list(range(here[0].local_world_size))
        assert [i.device_index for i in here] == sorted(i.device_index for i in here)
