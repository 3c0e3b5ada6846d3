"""Places beside workers: the same bundles, of which nothing is taken, for as many as want to have any."""

from types import SimpleNamespace

import pytest

from raycrew.cluster_core import Claim, Cluster, ClusterClosedError
from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import WorkerGroupClosedError
from raycrew.worker_groups._group.beside import ClaimBeside
from raycrew.worker_groups.testing import InProcessGroup


class Nothing:
    """A worker that does nothing."""


@pytest.fixture
def cluster():
    with FakeCluster([2, 2], use_gpus=True) as made:
        yield made


@pytest.fixture
def group(cluster):
    with InProcessGroup(cluster, Nothing, bundle_indices_list=[[3], [0]]) as made:
        yield made


def test_the_bundles_are_those_of_the_workers_in_rank_order(group):
    places = group.places_beside()
    assert isinstance(places, Cluster)
    assert [bundle.index for bundle in places.bundles] == [3, 0]
    assert [bundle.index for bundle in places.claim(None, "all").bundles] == [3, 0]
    assert [bundle.index for bundle in places.claim([0, 3], "some").bundles] == [0, 3]
    assert places.rendezvous(3).node_id == places.bundles[0].node_id
    first = places.rendezvous()
    assert (first.node_id, len(first.ports)) == (places.bundles[1].node_id, 1)
    assert [result for _, result in places.run_on_each_node(lambda: 3)] == [3, 3]


def test_who_meets_there_meets_on_the_first_bundle_of_the_cluster_unless_another_one_is_named():
    with FakeCluster([1, 1]) as cluster:
        nodes = [bundle.node_id for bundle in cluster.bundles]
        with InProcessGroup(cluster, Nothing, bundle_indices_list=[[1], [0]]) as group:
            places = group.places_beside()
            assert [places.rendezvous().node_id, places.rendezvous(1).node_id] == nodes


def test_nothing_is_taken_of_them_by_any_number_of_holders(cluster, group):
    places, before = group.places_beside(), cluster.holders()
    for claim in [places.claim(None, "a"), places.claim([3], "b")]:
        assert isinstance(claim, Claim)
        options = claim.actor_options(0)
        assert (options["num_cpus"], options["num_gpus"], options["resources"]) == (0, 0, {})
        claim.learn({0: 1})
        claim.settle()
        claim.release()
    assert cluster.holders() == before


def test_groups_beside_a_group_are_in_its_places_and_can_have_others_beside_them(cluster, group):
    with (
        InProcessGroup(group.places_beside(), Nothing, bundle_indices_list=[[0], [1]]) as beside,
        InProcessGroup(beside.places_beside(), Nothing, bundle_indices_list=[[1]]) as another,
    ):
        assert [info.bundle_index for info in (*beside.ranks, *another.ranks)] == [3, 0, 0]
        assert set(cluster.holders()) == {0, 3}


def test_other_bundles_can_not_be_had_there(group):
    with pytest.raises(ValueError, match=r"\[1\] are not among \[0, 3\]"):
        group.places_beside().claim([1, 3], "a")


def test_they_are_gone_when_the_cluster_or_the_group_is(cluster, group):
    claim = group.places_beside().claim(None, "a")
    claim.check()
    cluster.shutdown()
    with pytest.raises(ClusterClosedError):
        claim.check()
    group.shutdown()
    with pytest.raises(WorkerGroupClosedError):
        group.places_beside()


def test_all_but_what_is_taken_is_as_for_whoever_holds_the_bundle():
    where = {"label_selector": {"zone": "a"}, "scheduling_strategy": "there"}
    taken = {"num_cpus": 2, "num_gpus": 1, "memory": 7, "resources": {"TPU": 1}}
    held = SimpleNamespace(actor_options=lambda position: {**where, **taken, "name": f"of {position}"})
    beside = {**where, "name": "of 4", "num_cpus": 0, "num_gpus": 0, "resources": {}}
    assert ClaimBeside(held, [2, 4]).actor_options(1) == beside
