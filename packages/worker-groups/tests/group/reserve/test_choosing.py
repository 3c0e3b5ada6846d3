"""Which spare bundles the workers come to that replace others."""

from types import SimpleNamespace

import pytest

from raycrew.cluster_core import BundleSpec
from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups._group.life import claim_places
from raycrew.worker_groups._group.reserve.choosing import choose, templates
from raycrew.worker_groups._start import GroupSpec, Layout
from raycrew.worker_groups.sharding import plan_seats


def spec_of(cluster, n_spare=0, standby=0, launchers=None, **layout):
    plan = plan_seats(cluster.bundles, n_spare=n_spare, **layout)
    options = SimpleNamespace(n_spare=n_spare, standby=standby, launchers=launchers)
    return GroupSpec("g", None, cluster, plan, options)


def made(cluster, **options):
    """A group's layout without workers, and its spare bundles by index."""
    spec = spec_of(cluster, **options)
    claim = cluster.claim(spec.plan.indices, "g")
    return Layout(spec, claim, None), {place.bundle.index: place for place in claim_places(spec, claim)}


def chosen(layout, positions, lost, places):
    return {p: place.bundle.index for p, place in choose(layout, positions, lost, places).items()}


@pytest.fixture
def two_nodes():
    """Ranks on bundles 0 and 3; 1, 2 and 4 are spare."""
    return made(FakeCluster([3, 2]), workers_per_node=1, n_spare=3)


@pytest.mark.parametrize(
    ("positions", "lost", "stand_by", "found"),
    [
        ([0, 1], [], [], {}),
        ([0], [], [4], {0: 4}),
        ([1], [], [1, 4], {1: 4}),
        ([0, 1], [], [2], {0: 2}),
        ([1], [1], [1], {1: 1}),
        ([1], [1], [], {1: 4}),
        ([0, 1], [1], [1], {1: 1}),
        ([0, 1], [1], [1, 2], {1: 1, 0: 2}),
        ([0, 1], [0, 1], [], {0: 1, 1: 4}),
    ],
)
def test_who_has_lost_a_bundle_takes_any_and_others_only_where_somebody_stands_by(
    two_nodes, positions, lost, stand_by, found
):
    layout, spare = two_nodes
    assert chosen(layout, positions, lost, {p: i in stand_by for i, p in spare.items()}) == found


def test_who_finds_none_is_left_out(two_nodes):
    layout, spare = two_nodes
    assert chosen(layout, [0, 1], [0, 1], {spare[4]: False}) == {0: 4}
    assert chosen(layout, [0, 1], [0, 1], {}) == {}


def test_a_bundle_that_holds_less_is_not_taken():
    specs = [[BundleSpec(cpus=2), BundleSpec(cpus=2), BundleSpec(cpus=1)]]
    cluster = FakeCluster([3], bundle_specs=specs)
    with pytest.raises(ValueError, match=r"asks for 2 bundle\(s\) more; its cluster has 1 besides"):
        made(cluster, bundle_indices_list=[[0]], n_spare=2)
    layout, spare = made(FakeCluster([3], bundle_specs=specs), bundle_indices_list=[[2], [0]], n_spare=1)
    small = layout.place(0)
    assert chosen(layout, [1], [1], {small: True}) == {}
    assert chosen(layout, [0], [0], {small: True}) == {0: 2}
    assert (list(templates(layout, [small])), list(templates(layout, [spare[1]]))) == ([0], [0])


def test_what_ranks_have_no_use_for_is_left_to_others_as_long_as_there_is_a_choice():
    specs = [[BundleSpec(cpus=1, gpus=1), BundleSpec(cpus=1), BundleSpec(cpus=1)]]
    assert list(made(FakeCluster([3], bundle_specs=specs), bundle_indices_list=[[1]], n_spare=1)[1]) == [2]
    assert set(made(FakeCluster([3], bundle_specs=specs), bundle_indices_list=[[1]], n_spare=2)[1]) == {0, 2}


def test_who_is_to_stand_by_is_started_as_somebody_on_that_node(two_nodes):
    layout, spare = two_nodes
    found = templates(layout, [spare[4], spare[1], spare[2]])
    assert {p: place.bundle.index for p, place in found.items()} == {1: 4, 0: 1}


def test_moving_changes_one_bundle_and_gives_the_other_back_as_a_place(two_nodes):
    layout, spare = two_nodes
    moved = layout.moved({0: spare[4]})
    assert [bundle.index for bundle in moved.claim.bundles] == [4, 3]
    assert [bundle.index for bundle in layout.claim.bundles] == [0, 3]
    again = moved.moved({0: layout.place(0)})
    assert [bundle.index for bundle in again.claim.bundles] == [0, 3]
    assert layout.moved({}) is layout
    layout.place(0).claim.release()
    assert sorted(layout.spec.cluster.holders()) == [1, 2, 3, 4]
    moved.claim.release()
    assert sorted(layout.spec.cluster.holders()) == [1, 2]


def test_who_stands_by_is_started_as_any_other():
    cluster = FakeCluster([3])
    with pytest.raises(ValueError, match="standby= is for workers that are all started alike"):
        made(cluster, n_spare=1, standby=1, launchers={"g-0-1": "nice"})
    made(FakeCluster([3]), n_spare=1, launchers={"g-0-1": "nice"})
    made(FakeCluster([3]), n_spare=1, standby=1, launchers={"g-0-*": "nice"})
