"""How long a receiver keeps to itself which buckets it has: as long as nobody can wait for one of them."""

import pytest
from authors import Author, enter
from models import assert_same, weights
from streaming import Generator, Trainer, at_a_pace, sync

from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightDirectory
from raycrew.tensor_transport.weights._directory.record import Record

LEASE_S = 60.0


def crew(keep=1, ballots=("mine",)):
    """A record, of whose version two buckets are put; receivers of all ballots have asked what there is."""
    record = Record(keep, LEASE_S)
    author = Author(record)
    number = record.reserve(0, ballots, None)
    author.begin()
    author.put()
    enter(record, number, **{f"reader {ballot}": ballot for ballot in ballots})
    return record, author, number


def test_nobody_waits_for_the_buckets_of_the_only_reader():
    record, _, number = crew()
    assert record.news(0, number, "reader mine", "node", (0,)).quiet_s == LEASE_S / 4


@pytest.mark.hostile
def test_who_keeps_no_version_waits_until_buckets_are_had():
    record, _, number = crew(keep=0)
    assert record.news(0, number, "reader mine", "node", (0,)).quiet_s == 0


@pytest.mark.hostile
def test_a_publisher_with_a_window_waits_until_buckets_are_had():
    record, author, number = crew()
    assert record.credit(0, number, author.part, author.name, 4, 100)
    assert record.news(0, number, "reader mine", "node", (0,)).quiet_s == 0


@pytest.mark.hostile
def test_nodes_that_come_later_in_a_relay_wait_until_buckets_are_had():
    record, _, number = crew(ballots=("a", "b"))
    news = record.news(0, number, "reader a", "first", (0,))
    assert news.quiet_s == 0, "where the other one will read is not known yet"
    record.news(0, number, "reader b", "second", (0,))
    assert record.news(0, number, "reader a", "first", (0,)).quiet_s == 0


def test_nobody_waits_for_readers_of_one_node():
    record, _, number = crew(ballots=("a", "b"))
    for reader in ("reader a", "reader b"):
        news = record.news(0, number, reader, "node", (0,))
    assert news.quiet_s > 0


@pytest.mark.hostile
def test_who_may_read_what_nobody_asked_for_is_not_known():
    record = Record(1, LEASE_S)
    author = Author(record)
    author.begin()
    author.put()
    assert record.news(0, author.number, "reader", "node", (0,)).quiet_s == 0


@pytest.mark.parametrize(("window_bytes", "is_said"), [(None, False), (1 << 20, True)])
def test_what_is_had_within_an_update_is_said_to_who_waits_for_it(monkeypatch, window_bytes, is_said):
    """And in the end: a receiver that has all may take its time."""
    at_a_pace(monkeypatch, 0.0)
    took = []

    class Heard(Record):
        """Tells of all buckets at once."""

        def news(self, now, number, *args):
            return None if self.versions[number].state == "open" else super().news(now, number, *args)

        def took(self, now, number, receiver, seen):
            took.append(sum(seen))
            super().took(now, number, receiver, seen)

    store, directory = InProcessByteStore(), WeightDirectory.local()
    record = directory._edge._record = Heard(lease_s=1e9)
    trainer, generator = Trainer(store, directory, window_bytes=window_bytes), Generator(store, directory)
    sync([trainer], [generator], directory, publish="publish_mapping")
    count = len(record.versions[1].buckets)
    assert count > 2 and took[-1] == count
    assert_same(generator.model.tensors, weights(0))
    assert (len(took) > 1) is is_said
