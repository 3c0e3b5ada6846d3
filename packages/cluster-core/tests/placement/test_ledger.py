"""What the ledger of slots learns of devices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycrew.cluster_core import Bundle, BundlesOccupiedError
from raycrew.cluster_core._placement import LedgerClaim, SlotLedger
from raycrew.cluster_core._placement.indices import check_indices
from raycrew.cluster_core._placement.ledger import share_of
from raycrew.cluster_core._planning import RESOURCE_STEP, Process
from raycrew.cluster_core.testing import FakeCluster


def test_devices_are_those_of_the_clusters_accelerator():
    seats = [Bundle(i, 0, "n", "10.0.0.1", {"NPU": held, "GPU": 1.0}) for i, held in enumerate((2.0, 1.0))]
    ledger = SlotLedger(seats, 2, "NPU")
    assert ledger.unknown_seats(partly={0}) == set()
    ledger.learn({0: 0, 1: 2})
    ledger.learn({0: 1, 1: 2})
    assert [bundle.device_index for bundle in ledger.bundles] == [None, 2]


def test_whoever_shares_at_most_one_device_tells_which():
    held = (0.5, 1.0, 2.0)
    ledger = SlotLedger([Bundle(i, 0, "n", "10.0.0.1", {"GPU": n}) for i, n in enumerate(held)], 2)
    ledger.learn({0: 3, 1: 4, 2: 5})
    assert [bundle.device_index for bundle in ledger.bundles] == [3, 4, None]


def test_only_devices_that_tell_an_order_are_asked_for():
    pairs = [Bundle(i, 0, "n", "10.0.0.1", {"GPU": 2.0}) for i in range(2)]
    assert SlotLedger(pairs, 1).unknown_seats(partly={0}) == {0, 1}
    assert SlotLedger(pairs, 2).unknown_seats(partly={0}) == set()


def test_nobody_is_asked_for_devices_of_which_all_or_none_are_told_or_that_others_hold():
    held = (1.0, 1.0, 1.0, 2.0)
    ledger = SlotLedger([Bundle(i, 0, "n", "10.0.0.1", {"GPU": n}) for i, n in enumerate(held)], 1)
    assert ledger.unknown_seats(partly={0}) == {0, 1, 2}
    for partly in ({0, 1, 2}, {0, 1, 2, 3}, {3}, set()):
        assert ledger.unknown_seats(partly=partly) == set()
    ledger.take([1], "other")
    ledger.learn({2: 5})
    assert ledger.unknown_seats(partly={2}) == {0}


@pytest.mark.parametrize("wrong", [True, 1.0, "1", None])
def test_indices_of_bundles_are_integers(wrong):
    with pytest.raises(TypeError, match="not an integer"):
        check_indices([0, wrong], 4)


def test_indices_of_bundles_are_from_zero_to_the_last_and_each_once():
    check_indices([0, 3], 4)
    for wrong, said in (
        ([-1], "outside 0 to 3"),
        ([4], "outside 0 to 3"),
        ([2, 1, 2], r"\[2\] are repeated"),
    ):
        with pytest.raises(ValueError, match=said):
            check_indices(wrong, 4)
    with pytest.raises(ValueError, match="None stands for all"):
        check_indices([], 4)


def test_all_that_a_holder_has_is_given_back_and_nothing_of_others():
    ledger = SlotLedger([Bundle(i, 0, "n", "10.0.0.1", {"CPU": 1.0}) for i in range(4)], 1)
    for holder, indices in (("b", [0]), ("a", [1]), ("b", [2]), ("c", [3])):
        ledger.take(indices, holder)
    assert ledger.release_holder("b") == 2
    assert ledger.holders() == {1: ("a",), 3: ("c",)}
    assert ledger.release_holder("b") == 0


def test_some_bundles_of_a_claim_are_given_back_alone():
    cluster = FakeCluster([3])
    claim = cluster.claim([0, 2], "holder")
    claim.give_back([1])
    claim.give_back([1])
    assert cluster.holders() == {0: ("holder",)}
    assert [bundle.index for bundle in claim.bundles] == [0, 2], "positions stay"
    other = cluster.claim([2], "other")
    claim.give_back([1])
    assert cluster.holders() == {0: ("holder",), 2: ("other",)}, "what another one took meanwhile stays"
    claim.release()
    other.release()
    assert cluster.holders() == {}


@pytest.mark.parametrize("wrong", [-1, 2])
def test_positions_of_a_claim_are_not_counted_from_its_end(wrong):
    cluster = FakeCluster([3])
    claim = cluster.claim([0, 2], "holder")
    for use in (claim.give_back, lambda positions: claim.learn(dict.fromkeys(positions, 7))):
        with pytest.raises(IndexError, match=f"position {wrong} is outside 0 to 1"):
            use([0, wrong])
    with pytest.raises(IndexError, match=f"position {wrong} is outside 0 to 1"):
        claim.actor_options(wrong)
    assert cluster.holders() == {0: ("holder",), 2: ("holder",)}
    assert [bundle.device_index for bundle in claim.bundles] == [None, None]


def test_a_claim_looks_after_the_bundles_alone_that_it_still_has():
    looked, ledger = [], SlotLedger(FakeCluster([3]).bundles, 1)
    claim = LedgerClaim(ledger, ledger.take(None, "holder"), str, looked.append)
    claim.give_back([1])
    claim.check()
    assert looked == [[0, 2]]
    claim.give_back([0, 2])
    claim.check()
    assert (looked, ledger.holders()) == ([[0, 2]], {}), "nothing is left to look after"


def test_all_that_gone_processes_had_is_given_back_and_counted():
    ledger = SlotLedger([Bundle(i, 0, "n", "10.0.0.1", {"CPU": 1.0}) for i in range(4)], 1)
    gone, here = Process("01", "n", "a"), Process("01", "n", "b")
    for index, process in enumerate((gone, here, gone, None)):
        ledger.take([index], f"holder {index}", process)
    assert ledger.processes() == {gone, here}
    assert ledger.forget([gone, Process("01", "n", "c")]) == 2
    assert ledger.holders() == {1: ("holder 1",), 3: ("holder 3",)}
    assert ledger.processes() == {here} and ledger.forget([gone]) == 0


def test_a_claim_that_is_asked_for_twice_is_one():
    ledger = SlotLedger([Bundle(0, 0, "n", "10.0.0.1", {"CPU": 1.0})], 1)
    slot = ledger.take(None, "mine", None, "a token")
    assert slot.token == "a token" and ledger.take(None, "mine", None, "a token") == slot
    with pytest.raises(BundlesOccupiedError):
        ledger.take(None, "other", None, "another token")
    ledger.release("a token")
    assert ledger.holders() == {}


@given(st.integers(1, 50_000), st.integers(1, 9))
def test_slots_never_take_more_than_there_is_and_leave_less_than_a_step_each(steps, slots):
    amount = steps / RESOURCE_STEP
    share = share_of(amount, slots)
    assert share_of(amount, 1) == amount
    assert -1e-9 < amount - share * slots < slots / RESOURCE_STEP + 1e-9
    assert round(share * RESOURCE_STEP) / RESOURCE_STEP == share
