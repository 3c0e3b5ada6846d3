"""What the ledger of slots learns of devices."""

from raycrew.cluster_core import Bundle
from raycrew.cluster_core._placement import SlotLedger


def test_devices_are_those_of_the_clusters_accelerator():
    seats = [Bundle(i, 0, "n", "10.0.0.1", {"NPU": held, "GPU": 1.0}) for i, held in enumerate((2.0, 1.0))]
    ledger = SlotLedger(seats, 2, "NPU")
    assert ledger.unknown_seats(partly={0}) == set()
    ledger.learn({0: 0, 1: 2})
    ledger.learn({0: 1, 1: 2})
    assert [bundle.device_index for bundle in ledger.bundles] == [None, 2]


def test_only_devices_that_tell_an_order_are_asked_for():
    pairs = [Bundle(i, 0, "n", "10.0.0.1", {"GPU": 2.0}) for i in range(2)]
    assert SlotLedger(pairs, 1).unknown_seats(partly={0}) == {0, 1}
    assert SlotLedger(pairs, 2).unknown_seats(partly={0}) == set()
