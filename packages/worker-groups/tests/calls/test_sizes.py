from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest
import ray

from raycrew.worker_groups._calls import sizes
from raycrew.worker_groups._calls.sizes import STORE_FROM_BYTES, SharedStore, size_hint


class Array:
    nbytes = 1 << 20


class Holder:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize(
    "value",
    [
        bytes(200_000),
        "x" * 200_000,
        Array(),
        [Array()],
        {"a": (Array(),)},
        Holder(Array()),
        list(range(100_000)),
    ],
)
def test_large_values_are_seen(value):
    assert size_hint(value) >= STORE_FROM_BYTES


@pytest.mark.parametrize(
    "value", [None, 1, "x", [1, 2, 3], {"a": [1.0] * 100}, Holder(Holder(1)), range(10**9), Holder]
)
def test_small_values_stay_small(value):
    assert size_hint(value) < STORE_FROM_BYTES


def test_a_value_that_holds_itself_is_no_trap():
    loop = []
    loop.append(loop)
    assert size_hint(loop) >= STORE_FROM_BYTES


def test_a_shared_value_is_stored_once(local_ray):
    store, blob = SharedStore(), bytes(200_000)
    first = store.share(blob)
    assert isinstance(first, ray.ObjectRef)
    assert store.share(blob) is first
    assert store.share(first) is first
    assert store.share("small") == "small"


def test_a_value_of_a_thousand_parts_counts_as_large():
    assert size_hint([b""] * 998) < STORE_FROM_BYTES
    assert size_hint([b""] * 1000) >= STORE_FROM_BYTES
    assert size_hint({"a": [0] * 500, "b": [0] * 600}) >= STORE_FROM_BYTES


def test_a_size_is_that_of_all_parts_together():
    assert [size_hint(bytes(n)) for n in (0, 5, STORE_FROM_BYTES - 1)] == [0, 5, STORE_FROM_BYTES - 1]
    assert size_hint(Array()) == Array.nbytes
    alone = [size_hint(part) for part in ("text", 7, None, b"abc")]
    assert size_hint(["text", 7, None, b"abc"]) == size_hint([]) + sum(alone)
    assert size_hint({"k": b"abc"}) == size_hint({}) + 1 + 3
    assert size_hint(Holder(b"abc")) == size_hint(Holder(b"")) + 3
    assert 1 <= size_hint(7) <= 16


class Untouched:
    """Has a great many parts, and none that may be looked at."""

    def __len__(self):
        return 10**9

    def __iter__(self):
        raise AssertionError("it was walked")

    def __getitem__(self, _):
        raise AssertionError("it was walked")


class ManyRows(Untouched, Sequence):
    pass


class ManyNames(Untouched, Mapping):
    pass


@pytest.mark.parametrize("many", [ManyRows(), ManyNames()])
def test_what_has_a_great_many_parts_is_large_without_a_look_at_them(many):
    assert size_hint(many) >= STORE_FROM_BYTES


def test_only_so_many_parts_are_looked_at():
    looks = []

    class Empty:
        @property
        def nbytes(self):
            looks.append(1)
            return 0

    assert size_hint([[Empty()] * 900] * 900) >= STORE_FROM_BYTES
    assert len(looks) <= 3000, "of 810,000"


def test_large_values_alone_go_into_the_store_and_each_once(monkeypatch):
    put = []
    monkeypatch.setattr(sizes, "ray", SimpleNamespace(ObjectRef=Holder, put=lambda value: put.append(value)))
    store, large = SharedStore(), [bytes(200_000)]
    for value in (large, large, "x" * 200_000, "small", ["small"], Holder(bytes(200_000))):
        store.share(value)
    assert put == [large, "x" * 200_000]
    assert (store.share(large), store.share(7)) == (None, 7)
