"""Numbers that ranks give their versions: from 1, again after a failure, and never within an update."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from authors import Author
from streaming import TIMEOUT_S

from raycrew.tensor_transport.errors import StaleVersionError, UpdateAbortedError, WeightUpdateError
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher, WeightReceiver
from raycrew.tensor_transport.weights._directory.record import Record


@pytest.fixture
def store():
    return InProcessByteStore()


def ranks_of(store, directory, count=2):
    return [
        WeightPublisher(store, directory=directory, part=i, parts=count, timeout_s=5) for i in range(count)
    ]


def breaks():
    yield "a", torch.ones(2)
    raise RuntimeError("the shard is gone")


@pytest.mark.hostile
def test_a_number_that_was_given_up_says_why_and_can_be_published_again(store):
    directory = WeightDirectory.local()
    first, second = ranks_of(store, directory)
    with pytest.raises(RuntimeError, match="the shard is gone"):
        first.publish(breaks(), version=1)
    with pytest.raises(UpdateAbortedError, match=r"version 1 was given up: part 0: .*the shard is gone"):
        second.publish({"b": torch.ones(2)}, version=1)
    first.publish({"a": torch.zeros(2)}, version=1)
    second.publish({"b": torch.zeros(2)}, version=1)
    loaded = {}
    assert WeightReceiver(loaded.update, store=store, directory=directory).pull().version == 1
    assert not any(tensor.any() for tensor in loaded.values())
    with pytest.raises(StaleVersionError, match="1 is not above it"):
        first.publish({"a": torch.ones(2)}, version=1)


@pytest.mark.hostile
def test_who_read_what_was_given_up_is_not_given_the_rest_of_what_replaced_it():
    record = Record()
    author = Author(record)
    author.begin(version=1)
    author.put(count=1)
    record.offer(0, 1, receiver="a")
    assert len(record.news(0, 1, "a", "n", (0,)).buckets) == 1
    record.abort(0, 1, "the trainer failed")
    author.publish(version=1)
    for ask in (
        lambda: record.news(0, 1, "a", "n", (1,)),
        lambda: record.took(0, 1, "a", (1,)),
    ):
        with pytest.raises(UpdateAbortedError, match="version 1 was given up: it was begun anew"):
            ask()
    record.offer(0, 1, receiver="a")
    assert len(record.news(0, 1, "a", "n", (0,)).buckets) == 2


@pytest.mark.hostile
def test_a_part_of_what_was_given_up_is_no_part_of_what_replaced_it():
    record = Record()
    first, second = (Author(record, part, 2) for part in range(2))
    first.begin(version=1)
    second.begin(version=1)
    record.abort(0, 1, "part 0 failed", 0, first.name)
    assert first.begin(version=1) == 1
    for tell in (second.put, second.finish, lambda: record.credit(0, 1, 1, second.name, 4, 4)):
        with pytest.raises(UpdateAbortedError, match="begun anew, without part 1"):
            tell()
    assert record.abort(0, 1, "part 1 failed, too", 1, second.name), "its buckets are its own to release"
    first.put()
    first.finish()
    assert second.publish(version=1) == 1
    assert record.newest(0) == 1


@pytest.mark.parametrize("directed", [True, False])
def test_versions_begin_at_1(store, directed):
    publisher = WeightPublisher(store, directory=WeightDirectory.local() if directed else None)
    for version in (0, -1):
        with pytest.raises(ValueError, match=rf"versions begin at 1, got {version}: give step \+ 1"):
            publisher.publish({"a": torch.ones(2)}, version=version)
    for version in (True, 1.0, "1"):
        with pytest.raises(TypeError):
            publisher.publish({"a": torch.ones(2)}, version=version)
    with pytest.raises(ValueError, match="versions end at 9223372036854775807"):
        publisher.publish({"a": torch.ones(2)}, version=2**63)
    assert publisher.publish({"a": torch.ones(2)}, version=1).version == 1
    found = publisher.publish({"a": torch.ones(2)}, version=np.int64(2)).version
    assert (type(found), found) == (int, 2)
    assert len(store.held) == 1


@pytest.mark.hostile
@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_receivers_take_the_numbers_that_rows_are_tagged_with(store, kind):
    directory = WeightDirectory.local(keep=2)
    publisher, loaded = WeightPublisher(store, directory=directory), {}
    for value in range(3):
        publisher.publish({"a": torch.full((2,), float(value))})
    receiver = WeightReceiver(loaded.update, store=store, directory=directory)
    assert receiver.pull(kind(2)).version == receiver.version == 2
    assert receiver.prepare(kind(3)).version == receiver.apply(kind(3)).version == 3
    assert loaded["a"].tolist() == [2.0, 2.0] and type(receiver.version) is int
    for version in ("3", 3.0, None):
        with pytest.raises(TypeError):
            receiver.apply(version)


def test_a_number_within_an_update_is_said_to_be_that_of_sync_weights():
    record = Record()
    author = Author(record)
    number = record.reserve(0, ["1"], None)
    with pytest.raises(StaleVersionError, match=rf"version {number} is being .*; leave version= out"):
        author.begin(version=9)


def test_parts_that_nobody_asked_for_are_not_advised_to_name_a_version_that_is_not_taken(store):
    first, _ = ranks_of(store, WeightDirectory.local(keep=0))
    for version in (None, 1):
        with pytest.raises(WeightUpdateError, match="takes updates from sync_weights"):
            first.publish({"a": torch.ones(2)}, version=version)


@pytest.mark.hostile
@pytest.mark.parametrize("window_bytes", [None, 4096])
def test_a_publisher_that_was_replaced_and_goes_on_leaves_its_successor_the_version(store, window_bytes):
    directory, is_stopped, goes_on = WeightDirectory.local(), threading.Event(), threading.Event()
    how = {"directory": directory, "bucket_bytes": 512, "timeout_s": TIMEOUT_S, "window_bytes": window_bytes}
    old = WeightPublisher(store, **how)

    def stands_still():
        yield "a", torch.zeros(200)
        is_stopped.set()
        goes_on.wait(TIMEOUT_S)
        yield from ((name, torch.zeros(200)) for name in "bc")

    def waits():
        yield "a", torch.ones(200)
        goes_on.set()
        with pytest.raises(StaleVersionError, match="was replaced"):
            going_on.result(TIMEOUT_S)
        yield from ((name, torch.ones(200)) for name in "bc")

    with ThreadPoolExecutor() as pool:
        going_on = pool.submit(old.publish, stands_still(), version=5)
        assert is_stopped.wait(TIMEOUT_S)
        new = WeightPublisher(store, **how)
        assert new.publish(waits(), version=5).version == 5
    loaded = {}
    assert WeightReceiver(loaded.update, store=store, directory=directory).pull().version == 5
    assert all(tensor.all() for tensor in loaded.values()) and len(loaded) == 3


@pytest.mark.hostile
def test_who_was_replaced_and_asks_for_room_keeps_no_version_of_its_successor_from_its_end():
    record = Record(lease_s=10)
    old = Author(record, name="old")
    old.begin(version=1)
    new = Author(record, name="new")
    new.begin(now=1, version=1)
    with pytest.raises(StaleVersionError, match="publisher old of part 0 was replaced by new"):
        record.credit(9, 1, 0, "old", 4, 4)
    assert record.abort(9, 1, "it is stale", 0, "old"), "what it put is nobody else's"
    assert record.decision(9, 1) is None
    assert record.decision(11, 1) == "aborted"
