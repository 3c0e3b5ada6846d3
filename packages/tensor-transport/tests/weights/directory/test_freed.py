"""Who is told, and how long, to release the buckets that nobody needs any more."""

import time

import pytest
import torch
from authors import Author

from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher, WeightReceiver
from raycrew.tensor_transport.weights._directory.directory import _LocalEdge
from raycrew.tensor_transport.weights._directory.freed import Freed
from raycrew.tensor_transport.weights._directory.record import Record
from raycrew.tensor_transport.weights._update.manifest import Bucket


@pytest.mark.hostile
def test_a_publisher_that_was_replaced_and_lives_is_told_whenever_it_is_closed():
    record = Record(keep=1, lease_s=10)
    replaced = Author(record, name="replaced", scope="its process")
    replaced.publish()
    Author(record, name="newer", scope="another process").publish()
    for now in (1, 12, 100):
        record.status(now)
    assert not record.retire(200, 0, "replaced")
    assert record.collect(200, "its process") == ["1/0/0", "1/0/1"]
    assert record.newest(200) == 2


@pytest.mark.hostile
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_publisher_that_is_replaced_and_closed_leaves_only_what_others_can_release(is_shared):
    stores = [InProcessByteStore(), InProcessByteStore()]
    directory = WeightDirectory.local()
    replaced = WeightPublisher(stores[0], directory=directory)
    replaced.publish({"a": torch.ones(2)})
    newer = WeightPublisher(stores[0] if is_shared else stores[1], directory=directory)
    replaced.close()
    assert directory.latest == (1 if is_shared else None)
    assert len(stores[0].held) == int(is_shared)
    newer.publish({"a": torch.zeros(2)})
    newer.close()
    assert not stores[0].held
    assert not stores[1].held


@pytest.mark.hostile
def test_buckets_of_publishers_that_died_long_ago_are_forgotten_after_a_lease(caplog):
    record = Record(keep=1, lease_s=10)
    for life in range(7):
        Author(record, name=f"life {life}", scope=f"process {life}").publish(100 * life)
    assert record.newest(600) == 7
    record.status(611)
    told = [len(record.collect(611, f"process {life}")) for life in range(7)]
    assert told == [0, 0, 2, 2, 2, 2, 0], "the last may live, and what the newest published is kept"
    assert [entry.args[:3] for entry in caplog.records] == [(2, 8, "process 0"), (2, 8, "process 1")]


@pytest.mark.hostile
def test_receivers_that_asked_before_may_release_what_outlives_its_trainer():
    record = Record(keep=1, lease_s=10)
    author = Author(record, scope="a folder")
    author.publish()
    assert record.collect(0, "a folder", "generator") == []
    record.retire(0, 0, author.name)
    record.status(50)
    record.status(100)
    assert record.collect(100, "a folder", "generator") == ["1/0/0", "1/0/1"]
    late = Author(record, scope="a folder")
    late.publish(100)
    record.retire(100, 0, late.name)
    record.leave(100, "generator")
    record.status(111)
    assert record.collect(111, "a folder") == [], "nobody was left"


def test_only_what_somebody_has_to_release_is_kept():
    freed, bucket = Freed(10), Bucket("ticket", 4, 0)
    freed.add("", bucket)
    freed.add("a folder", Bucket(None, 4, 0))
    assert freed.collect(0, "", "") == freed.collect(0, "a folder", "") == []
    freed.add("a folder", bucket)
    assert freed.collect(0, "another", "") == [] and freed.collect(0, "a folder", "") == ["ticket"]


@pytest.mark.hostile
def test_what_somebody_heard_of_who_was_killed_is_told_again_after_a_lease():
    freed = Freed(10)
    freed.enroll(0, "publisher", "a folder")
    freed.add("a folder", Bucket("one", 4, 0))
    assert freed.collect(0, "a folder", "killed") == ["one"]
    freed.add("a folder", Bucket("two", 4, 0))
    assert freed.collect(5, "a folder", "") == ["two"]
    freed.forget(11)
    assert freed.collect(11, "a folder", "") == ["one"]
    assert freed.collect(15, "a folder", "") == ["two"]
    assert freed.collect(99, "a folder", "") == [], "once"


@pytest.mark.hostile
def test_what_was_told_to_those_who_are_gone_is_not_kept():
    freed = Freed(10)
    for life in range(3):
        freed.enroll(0, f"life {life}", f"process {life}")
        freed.add(f"process {life}", Bucket("ticket", 4, 0))
        freed.collect(0, f"process {life}", "")
        freed.retire(0, f"life {life}")
    freed.forget(9)
    assert len(freed._told) == 3
    freed.forget(10)
    assert not freed._told


@pytest.mark.hostile
def test_an_answer_that_is_lost_on_its_way_keeps_nothing_until_the_end():
    store, record = InProcessByteStore(), Record(keep=1, lease_s=10)
    publisher = WeightPublisher(store, directory=WeightDirectory(_LocalEdge(record)))
    publisher.publish({"a": torch.ones(2)})
    now = time.monotonic()
    Author(record, name="newer", scope="another process").publish(now)
    assert record.collect(now, store.release_scope) == list(store.held), "whoever asked was killed"
    for ticket in record.collect(now + 11, store.release_scope, "receiver"):
        store.release(ticket)
    assert not store.held
    publisher.close()


def test_a_receiver_is_known_as_one_that_can_release_what_it_shares_a_store_with():
    store, record = InProcessByteStore(), Record(keep=1, lease_s=10)
    directory = WeightDirectory(_LocalEdge(record))
    update = WeightPublisher(store, directory=directory).publish({"a": torch.ones(2)})
    WeightReceiver(dict, store=store, directory=directory).pull()
    now = time.monotonic()
    record.retire(now, 0, update.publisher)
    record.status(now + 50)
    record.status(now + 100)
    assert len(record.collect(now + 100, store.release_scope)) == 1
