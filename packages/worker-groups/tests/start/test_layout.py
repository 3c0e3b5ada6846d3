"""The bundles of a group that gets fewer or more of them."""

import pytest

from raycrew.cluster_core import BundlesOccupiedError, BundleSpec
from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups._group.life import claim_more
from raycrew.worker_groups._start import JoinedClaim
from raycrew.worker_groups.testing import InProcessGroup


def indices(claim):
    return [bundle.index for bundle in claim.bundles]


def test_bundles_of_several_claims_are_one_claim_in_its_own_order():
    cluster = FakeCluster([4])
    joined = JoinedClaim.of(cluster.claim([0, 1], "g")).beside(cluster.claim([3], "g")).at([2, 1])
    assert indices(joined) == [3, 1]
    assert joined.actor_options(1)["num_cpus"] == 1
    joined.check()
    joined.settle()
    joined.learn({1: 7})
    assert [bundle.device_index for bundle in joined.bundles] == [None, 7]


def test_each_part_gives_back_what_is_its_own_and_nothing_else():
    cluster = FakeCluster([4])
    whole = JoinedClaim.of(cluster.claim([0, 1, 2], "g"))
    stays, goes = whole.at([2, 0]), whole.at([1])
    goes.release()
    goes.release()
    assert sorted(cluster.holders()) == [0, 2]
    stays.give_back([0])
    assert sorted(cluster.holders()) == [0]
    stays.release()
    assert cluster.holders() == {}


def test_the_first_free_bundles_are_taken():
    cluster = FakeCluster([6])
    own, other = cluster.claim([1], "g"), cluster.claim([0, 3], "other")
    three = claim_more(cluster, own, 3, "g")  # kept: what is forgotten is given back
    assert indices(three) == [2, 4, 5]
    assert cluster.holders()[0] == ("other",)
    other.release()
    assert indices(claim_more(cluster, own, 2, "g")) == [0, 3]


def test_who_holds_the_others_is_told_and_nothing_is_kept():
    cluster = FakeCluster([4])
    own, other = cluster.claim([0], "g"), cluster.claim([1, 2], "other")
    with pytest.raises(BundlesOccupiedError) as refused:
        claim_more(cluster, own, 2, "g")
    assert set(refused.value.holders) == {1, 2}
    assert cluster.holders() == {0: ("g",), 1: ("other",), 2: ("other",)}
    with pytest.raises(ValueError, match=r"'g' asks for 4 bundle\(s\) more; its cluster has 3 besides"):
        claim_more(cluster, own, 4, "g")
    other.release()


def test_what_becomes_free_on_the_way_is_not_taken_beyond_what_was_asked_for():
    cluster = FakeCluster([4])
    own, other = cluster.claim([0], "g"), cluster.claim([1, 2, 3], "other")
    asked = []

    class Freed:
        bundles = cluster.bundles

        def claim(self, wanted, name):
            asked.append(list(wanted))
            if len(asked) == 4:  # of one bundle each, all of which another one holds
                other.release()
            return cluster.claim(wanted, name)

    one = claim_more(Freed(), own, 1, "g")
    assert indices(one) == [1]
    assert asked == [[1], [2], [3], [1, 2, 3]]
    assert sorted(cluster.holders()) == [0, 1]


def test_placements_tell_which_ranks_are_tied_and_how_much_of_a_bundle_each_has():
    cluster = FakeCluster([5], max_colocated_worker_groups=2)
    with InProcessGroup(cluster, object, bundle_indices_list=[[3], [0, 1], [2], [4]]) as group:
        told = [(place.rank, place.bundle_index, place.tied_group) for place in group.placements]
        assert told == [(0, 3, None), (1, 0, 1), (2, 1, 1), (3, 2, None), (4, 4, None)]
        assert {place.share for place in group.placements} == {0.5}


def test_a_rank_of_a_bundle_without_cpus_has_all_of_it():
    cluster = FakeCluster([1], bundle_specs=BundleSpec(cpus=0, memory=1 << 20))
    with InProcessGroup(cluster, object) as group:
        assert [place.share for place in group.placements] == [1.0]


def test_a_share_is_that_of_the_devices_where_there_are_any():
    cluster = FakeCluster([1], bundle_specs=BundleSpec(cpus=3, gpus=4), max_colocated_worker_groups=2)
    with InProcessGroup(cluster, object) as group:
        assert [place.share for place in group.placements] == [0.5]
