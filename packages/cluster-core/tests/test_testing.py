import gc
from dataclasses import replace

import pytest
from watching import wait_until

from raycrew.cluster_core import BundlesOccupiedError, BundleSpec, Cluster, ClusterClosedError
from raycrew.cluster_core._placement import LedgerClaim
from raycrew.cluster_core.testing import FakeCluster, _fake, check_cluster


@pytest.mark.smoke
@pytest.mark.parametrize("counts", [[1], [2, 0, 3]])
@pytest.mark.parametrize("use_gpus", [False, True])
def test_the_fake_does_what_every_cluster_does(counts, use_gpus):
    cluster = FakeCluster(counts, use_gpus=use_gpus)
    assert isinstance(cluster, Cluster)
    check_cluster(cluster)


@pytest.mark.hostile
def test_a_claim_that_lacks_a_method_is_told(monkeypatch):
    # A class of its own: from Python 3.12 on `isinstance` remembers what it found of one.
    monkeypatch.setattr(_fake, "LedgerClaim", type("Lacking", (LedgerClaim,), {"settle": None}))
    with pytest.raises(AssertionError, match=r"a claim lacks something of `raycrew\.cluster_core\.Claim`"):
        check_cluster(FakeCluster([1]))


@pytest.mark.hostile
def test_bundles_out_of_node_order_and_functions_on_other_nodes_are_told(monkeypatch):
    monkeypatch.setattr(FakeCluster, "run_on_each_node", lambda self, fn: iter([("elsewhere", fn())]))
    with pytest.raises(AssertionError, match=r"a function ran on \['elsewhere'\]"):
        check_cluster(FakeCluster([1]))
    backwards = [replace(b, node_index=-b.node_index) for b in FakeCluster([1, 1]).bundles]
    monkeypatch.setattr(FakeCluster, "bundles", backwards)
    with pytest.raises(AssertionError, match="bundles are not in node order"):
        check_cluster(FakeCluster([1, 1]))


@pytest.mark.hostile
@pytest.mark.parametrize("shift", [1, -1])
def test_bundles_that_are_numbered_otherwise_are_told(monkeypatch, shift):
    others = [replace(bundle, index=bundle.index + shift) for bundle in FakeCluster([2]).bundles]
    monkeypatch.setattr(FakeCluster, "bundles", others)
    with pytest.raises(AssertionError, match="bundles are not numbered in their order"):
        check_cluster(FakeCluster([2]))


@pytest.mark.hostile
def test_a_function_that_runs_nowhere_is_told(monkeypatch):
    monkeypatch.setattr(FakeCluster, "run_on_each_node", lambda self, fn: iter(()))
    with pytest.raises(AssertionError, match=r"a function ran on \[\]"):
        check_cluster(FakeCluster([1]))


@pytest.mark.hostile
def test_a_claim_on_another_bundle_than_was_named_is_told(monkeypatch):
    claim = FakeCluster.claim
    monkeypatch.setattr(
        FakeCluster, "claim", lambda self, named, who: claim(self, [0] if who == "one" else named, who)
    )
    with pytest.raises(AssertionError, match="a claim is not on the bundle that was named"):
        check_cluster(FakeCluster([2]))


@pytest.mark.hostile
def test_ports_that_nobody_asked_for_are_told(monkeypatch):
    rendezvous = FakeCluster.rendezvous
    monkeypatch.setattr(FakeCluster, "rendezvous", lambda self, i=0, n=1: rendezvous(self, i, n + 1))
    with pytest.raises(AssertionError, match="port was handed out twice"):
        check_cluster(FakeCluster([2]))


def test_claims_may_ask_for_more_than_devices():
    check_cluster(FakeCluster([1], bundle_specs=BundleSpec(memory=1 << 20)))


def test_zero_bundle_nodes_keep_their_number():
    assert [b.node_index for b in FakeCluster([1, 0, 2]).bundles] == [0, 2, 2]


def test_a_fake_of_which_nothing_is_said_has_two_bundles_of_one_cpu():
    assert [bundle.resources for bundle in FakeCluster().bundles] == [{"CPU": 1.0}] * 2


@pytest.mark.parametrize("counts", [[-1], [0], [], [2, -1], [1.5], [True]])
def test_counts_that_no_cluster_can_have_are_refused(counts):
    with pytest.raises((ValueError, TypeError), match="bundle count"):
        FakeCluster(counts)


def test_bundles_without_cpus_have_none():
    cluster = FakeCluster([1], use_gpus=True, cpus_per_bundle=0)
    assert [bundle.resources for bundle in cluster.bundles] == [{"GPU": 1.0}]
    with pytest.raises(ValueError, match="nothing"):
        FakeCluster([1], cpus_per_bundle=0)


def test_bundles_that_differ_are_held_in_turn():
    specs = [[BundleSpec(gpus=1), BundleSpec(cpus=2)], BundleSpec(gpus=2)]
    cluster = FakeCluster([2, 1], bundle_specs=specs)
    check_cluster(cluster)
    assert [b.resources for b in cluster.bundles] == [{"CPU": 1, "GPU": 1}, {"CPU": 2}, {"CPU": 1, "GPU": 2}]
    with pytest.raises(ValueError, match="1 entries for 2 nodes"):
        FakeCluster([2, 1], bundle_specs=[BundleSpec()])


def test_learned_devices_decide_the_order():
    cluster = FakeCluster([3], use_gpus=True)
    claim = cluster.claim(None, "train")
    claim.learn({0: 2, 1: 0, 2: 1})
    assert [b.device_index for b in cluster.bundles] == [0, 1, 2]
    assert [b.index for b in claim.bundles] == [2, 0, 1]  # positions stay, indices are the new ones
    assert cluster.claim is not None
    with pytest.raises(ValueError, match="known to hold device 2"):
        claim.learn({0: 1})


@pytest.mark.parametrize(("gpus", "slots"), [(2, 2), (4, 2), (2, 4)])
def test_slots_that_share_several_devices_each_find_their_own(gpus, slots):
    specs = [[BundleSpec(gpus=gpus), BundleSpec(gpus=1), BundleSpec(gpus=1)]]
    cluster = FakeCluster([3], bundle_specs=specs, max_colocated_worker_groups=slots)
    first, second = cluster.claim(None, "first"), cluster.claim(None, "second")
    first.learn({0: 0, 1: 5, 2: 4})
    second.learn({0: 1, 1: 5, 2: 4})
    assert [b.device_index for b in cluster.bundles] == [None, 4, 5]
    assert [b.index for b in second.bundles] == [0, 2, 1]


@pytest.mark.parametrize(("gpus", "slots"), [(2, 3), (3, 4), (4, 6)])
def test_shares_that_do_not_fill_devices_are_refused(gpus, slots):
    with pytest.raises(ValueError, match=f"take {gpus} slots or a multiple"):
        FakeCluster([1], bundle_specs=BundleSpec(gpus=gpus), max_colocated_worker_groups=slots)


@pytest.mark.parametrize(("gpus", "slots"), [(2, 2), (2, 4), (3, 9), (4, 2), (1, 3), (0.5, 3)])
def test_shares_that_fill_devices_are_taken(gpus, slots):
    cluster = FakeCluster([1], bundle_specs=BundleSpec(gpus=gpus), max_colocated_worker_groups=slots)
    share = cluster.claim(None, "g").actor_options(0)["num_gpus"]
    assert gpus / slots - 1e-4 < share <= gpus / slots


def test_shares_never_ask_for_more_than_the_bundle_holds():
    cluster = FakeCluster([1], use_gpus=True, max_colocated_worker_groups=6)
    claims = [cluster.claim(None, f"g{i}") for i in range(6)]
    assert sum(c.actor_options(0)["num_gpus"] for c in claims) <= 1
    with pytest.raises(BundlesOccupiedError, match="g0, g1") as error:
        cluster.claim([0], "one too many")
    assert error.value.holders == {0: ("g0", "g1", "g2", "g3", "g4", "g5")}


def test_nothing_works_after_shutdown():
    with FakeCluster() as cluster:
        pass
    with pytest.raises(ClusterClosedError):
        cluster.claim(None, "late")


def test_a_cluster_that_takes_any_index_or_hands_a_port_out_twice_is_told(monkeypatch):
    claim, rendezvous = FakeCluster.claim, FakeCluster.rendezvous

    def willing(self, indices, holder):
        right = indices is None or sorted({*indices} & {0, 1}) == sorted(indices)
        return claim(self, indices if right else [0], holder)

    def forgetful(self, bundle_index=0, n_ports=1):
        return replace(
            rendezvous(self, bundle_index), ports=tuple(range(bundle_index, bundle_index + n_ports))
        )

    with monkeypatch.context() as patched, pytest.raises(AssertionError, match=r"indices \[2\] were taken"):
        patched.setattr(FakeCluster, "claim", willing)
        check_cluster(FakeCluster([2]))
    with monkeypatch.context() as patched, pytest.raises(AssertionError, match="port was handed out twice"):
        patched.setattr(FakeCluster, "rendezvous", forgetful)
        check_cluster(FakeCluster([2]))


@pytest.mark.parametrize("shown", [2, 4])
def test_a_cluster_whose_claims_are_on_more_or_fewer_bundles_than_it_shows_is_told(monkeypatch, shown):
    monkeypatch.setattr(FakeCluster, "bundles", FakeCluster([4]).bundles[:shown])
    with pytest.raises(AssertionError, match="a claim on None is not a claim on all bundles"):
        check_cluster(FakeCluster([3]))


@pytest.mark.parametrize("shown", [0, 1], ids=["fewer", "more"])
def test_a_claim_whose_positions_change_is_told(monkeypatch, shown):
    class Moving(LedgerClaim):
        @property
        def bundles(self):
            held = super().bundles
            if len(self._held_seats) == len(held):
                return held
            return [*held, *held] if shown else [held[position] for position in (1,)]

    monkeypatch.setattr(_fake, "LedgerClaim", Moving)
    with pytest.raises(AssertionError, match="positions changed when one bundle was given back"):
        check_cluster(FakeCluster([2]))


def test_a_rendezvous_is_one_port_on_the_first_node_unless_more_is_said():
    cluster = FakeCluster([1, 1])
    first, second = cluster.rendezvous(), cluster.rendezvous(1, 2)
    assert (first.node_id, len(first.ports)) == (cluster.bundles[0].node_id, 1)
    assert (second.node_id, len({*first.ports, *second.ports})) == (cluster.bundles[1].node_id, 3)


@pytest.mark.parametrize(
    ("index", "n_ports", "error"), [(-1, 1, IndexError), (2, 1, IndexError), (0, 0, ValueError)]
)
def test_a_rendezvous_is_on_a_bundle_that_there_is_and_of_one_port_at_least(index, n_ports, error):
    with pytest.raises(error):
        FakeCluster([1, 1]).rendezvous(index, n_ports)


def test_a_claim_that_was_forgotten_is_told_of_as_long_as_its_cluster_is_there(recwarn):
    def told(holder):
        gc.collect()
        return [one.category for one in recwarn if f"a claim of {holder!r} was forgotten" in str(one.message)]

    with FakeCluster([1]) as cluster:
        cluster.claim(None, "forgetful")
        assert told("forgetful") == [ResourceWarning]
        wait_until(lambda: cluster.holders() == {})
        kept = cluster.claim(None, "last")
    del kept
    assert told("last") == []
