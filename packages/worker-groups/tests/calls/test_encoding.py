"""Arguments that several workers share. No Ray here: small ones are not stored."""

from raycrew.worker_groups import MultiWorkerFuture
from raycrew.worker_groups._calls.encoding import Packer
from raycrew.worker_groups._calls.sizes import SharedStore


class Counting:
    def __init__(self):
        self.encoded = []

    def encode(self, value):
        self.encoded.append(value)
        return ["encoded", value]


def test_without_a_transport_arguments_stay_what_they_are():
    packer, rows = Packer(None), [1, 2]
    assert packer.pack([rows, "x"]) == [rows, "x"]
    assert packer.pack([rows])[0] is rows
    assert packer.pack_named({"rows": rows, "n": 3}) == {"rows": rows, "n": 3}


def test_each_object_is_encoded_once_for_all_calls_that_share_it():
    transport, rows, others = Counting(), [1, 2], [3]
    packer = Packer(transport)
    first, second = packer.pack([rows, others])
    assert (first, second) == (["encoded", rows], ["encoded", others])
    assert packer.pack([rows])[0] is first
    assert packer.pack_named({"again": others})["again"] is second
    assert transport.encoded == [rows, others]


class Store:
    """Says of everything that it was stored."""

    def share(self, value):
        return "stored", value


def test_what_is_sent_is_what_the_store_makes_of_what_was_encoded():
    packer, rows = Packer(Counting()), [1, 2]
    packer._store = Store()
    assert packer.pack([rows, rows]) == [("stored", ["encoded", rows])] * 2


def test_a_future_is_sent_as_the_result_that_it_stands_for(monkeypatch):
    monkeypatch.setattr(MultiWorkerFuture, "_as_argument", lambda self: ["result of", *self])
    transport, future = Counting(), MultiWorkerFuture(["a call"], [0])
    packer = Packer(transport)
    (sent,) = packer.pack([future])
    assert sent == ["result of", "a call"]
    assert packer.pack_named({"again": future})["again"] is sent
    assert transport.encoded == []


def test_small_values_are_shared_as_they_are():
    store = SharedStore()
    for value in (7, 1.5, True, None, "x", [1], {"a": 2}):
        assert store.share(value) is value
