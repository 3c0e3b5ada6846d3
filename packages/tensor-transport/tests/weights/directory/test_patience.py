"""Receivers that do nothing with a bucket before all are there: they hear of all at once, and say nothing."""

import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from authors import PLAN, Author, enter
from streaming import TIMEOUT_S, at_a_pace

from raycrew.tensor_transport import WeightDirectory, WeightPublisher, WeightReceiver, sync_weights
from raycrew.tensor_transport.errors import UpdateAbortedError
from raycrew.tensor_transport.testing import LocalPeers
from raycrew.tensor_transport.transports import SharedMemoryTransport
from raycrew.tensor_transport.weights._directory.directory import _LocalEdge
from raycrew.tensor_transport.weights._directory.record import Record


def weights(seed):
    return {f"w{i}": torch.full((64,), float(i + seed)) for i in range(8)}


class Crew:
    """A trainer and a generator with one memory, over a directory."""

    def __init__(self, record=Record, published=None, received=None):
        self.said, self.seed, self.got = [], 0, {}
        session = uuid.uuid4().hex
        self.stores = [SharedMemoryTransport(session) for _ in range(2)]
        self.directory = WeightDirectory.local()
        said = self.said

        class Noted(record):
            """Notes what is asked of it."""

            def __getattribute__(self, name):
                if name in ("offer", "news", "took", "announce", "vote"):
                    said.append(name)
                return super().__getattribute__(name)

        self.record = self.directory._edge._record = Noted(lease_s=1e9)
        options = {"directory": self.directory}
        self.publisher = WeightPublisher(
            self.stores[0], bucket_bytes=256, timeout_s=TIMEOUT_S, **options | (published or {})
        )
        received = {"borrow": True} | options | (received or {})
        self.receiver = WeightReceiver(self.load, store=self.stores[1], **received)

    def load(self, tensors):
        self.got = {name: tensor.clone() for name, tensor in tensors}

    def publish_weights(self):
        return self.publisher.publish(weights(self.seed))

    def prepare_weights(self, version):
        return self.receiver.prepare(version, timeout_s=TIMEOUT_S)

    def apply_weights(self, version):
        return self.receiver.apply(version, timeout_s=TIMEOUT_S)

    def update(self, **options):
        """What is said in an update."""
        self.seed += 1
        del self.said[:]
        peers = LocalPeers([self])
        options = {"prepare": "prepare_weights", "timeout_s": TIMEOUT_S} | options
        (self.receipt,) = sync_weights(peers, peers, directory=self.directory, **options).receipts
        assert all(torch.equal(self.got[name], tensor) for name, tensor in weights(self.seed).items())
        return self.said

    def await_patience(self):
        """From now on nothing is put before the receiver waits for all of it."""
        changed, reserve = self.directory._edge._changed, self.stores[0].reserve

        def late(size_bytes):
            with changed:
                while not self.record.versions[self.seed].patient:
                    changed.wait(0.01)
            return reserve(size_bytes)

        self.stores[0].reserve = late

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for one in (self.receiver, self.publisher, *self.stores):
            one.close()


def begun(record, *ballots, digest=None):
    """A record, a publisher that has begun a version for who shows these ballots, and its number."""
    author, number = Author(record), record.reserve(0, ballots or ("1",), None)
    author.begin(digest=digest)
    return record, author, number


@pytest.fixture(autouse=True)
def _announces_each_bucket(monkeypatch):
    at_a_pace(monkeypatch, 0.0)


@pytest.mark.parametrize("unsummed", [{"published": {"checksums": False}}, {"received": {"verify": False}}])
def test_who_neither_copies_nor_compares_buckets_says_nothing_of_them(unsummed):
    with Crew(**unsummed) as crew:
        crew.update()
        assert crew.update().count("took") == 0
        version = crew.record.versions[2]
        (taken,) = version.taken.values()
        assert taken == (8,) and not version.fetching
        crew.await_patience()
        crew.update()
        assert crew.update().count("announce") == 1, "with the end: nobody waited for any the time before"
        assert crew.receipt.wire_s > 0.0


@pytest.mark.parametrize(
    "received", [{}, {"borrow": False}, {"verify_first": True}], ids=["compares", "copies", "compares first"]
)
def test_who_looks_at_each_bucket_hears_of_each(received):
    with Crew(received=received) as crew:
        crew.update()
        crew.update()
        assert not crew.record.versions[2].patient


@pytest.mark.hostile
def test_who_loads_each_bucket_as_it_comes_hears_of_each():
    with Crew(published={"checksums": False}) as crew:
        for _ in range(2):
            crew.update(prepare=None)
            assert not crew.record.versions[crew.seed].patient


@pytest.mark.hostile
def test_a_publisher_that_waits_for_room_is_not_waited_for():
    with Crew(published={"checksums": False, "window_bytes": 300}) as crew:
        for _ in range(3):
            crew.update()
            assert crew.record.versions[crew.seed].is_hurried


@pytest.mark.hostile
def test_checksums_that_come_after_versions_without_are_compared():
    """What the last bucket was like is a guess of what the next ones are."""
    with Crew(published={"checksums": False}) as crew:
        crew.update()
        crew.publisher.close()
        crew.publisher = WeightPublisher(crew.stores[0], bucket_bytes=256, directory=crew.directory)
        for _ in range(2):
            crew.update()
        assert not crew.record.versions[3].patient


def test_who_knows_all_plans_and_is_patient_is_told_what_there_is_when_all_is():
    record, author, number = begun(Record())
    author.put(count=1)
    asked = (number, frozenset({PLAN.digest}), "a", "1", "n")
    assert len(record.offer(0, *asked).news.buckets) == 1
    assert record.offer(0, *asked, True) is None
    unknown = record.offer(0, number, frozenset({"another"}), "a", "1", "n", True)
    assert unknown.news is None and unknown.plans == (PLAN,), "there may be something to refuse"
    assert record.offer(0, *asked[:-1], "", True).news is None, "who reads nothing waits for nothing"
    author.put(count=1)
    assert record.offer(0, *asked, True) is None
    author.finish()
    assert record.offer(0, *asked, True).news.counts


@pytest.mark.hostile
@pytest.mark.parametrize("end", ["hurried", "aborted", "another plan"])
def test_who_waits_for_all_does_not_wait_for_what_does_not_come(end):
    record, author, number = begun(Record(), digest="another" if end == "another plan" else None)
    author.put(count=1)
    asked = (number, frozenset({PLAN.digest}), "a", "1", "n", True)
    if end == "hurried":
        assert record.offer(0, *asked) is None
        assert record.credit(0, number, 0, "publisher 0", 8, 1) is None
        assert len(record.offer(0, *asked).news.buckets) == 1
    elif end == "aborted":
        assert record.offer(0, *asked) is None
        record.abort(0, number, "given up")
        with pytest.raises(UpdateAbortedError, match="given up"):
            record.offer(0, *asked)
    else:
        assert record.offer(0, *asked).digests == ("another",)


@pytest.mark.hostile
def test_what_a_dead_receiver_still_asks_takes_nothing_from_the_one_in_its_place():
    """The call that waits for all buckets goes on in the directory when whoever made it is dead."""
    record, author, number = begun(Record(lease_s=1e9))
    edge = _LocalEdge(record)
    known = frozenset({PLAN.digest})
    with ThreadPoolExecutor() as pool:
        dead = pool.submit(edge.poll, "offer", (number, known, "a", "1", "n", True), TIMEOUT_S)
        with edge._changed:
            while "a" not in record.versions[number].patient:
                edge._changed.wait(0.01)
        assert edge.ask("offer", (number, known, "b", "1", "n"), TIMEOUT_S).news is None
        with pytest.raises(UpdateAbortedError, match="another receiver took the place of a"):
            dead.result(TIMEOUT_S)
    author.put()
    author.finish()
    edge.ask("vote", (number, "b", True, ""), TIMEOUT_S)
    assert record.decision(0, number) == "committed" and record.holders == {"b": number}


@pytest.mark.hostile
def test_who_looks_at_buckets_now_hears_of_each_from_the_next_update_on():
    with Crew(published={"checksums": False}) as crew:
        for _ in range(3):
            crew.update()
        crew.receiver.close()
        crew.receiver = WeightReceiver(
            crew.load, store=crew.stores[1], borrow=False, directory=crew.directory
        )
        crew.update()
        assert crew.update().count("announce") > 4


def test_all_have_to_be_patient_for_nothing_to_be_announced():
    record, author, number = begun(Record(), "1", "2")
    assert author.put(count=1)
    enter(record, number, a="1", b="2")
    assert record.news(0, number, "a", "n", (0,), True) is None
    assert author.put(count=1), "b did not say yet what it wants"
    assert record.news(0, number, "b", "n", (1,), True) is None
    assert not author.put(count=1)
    assert len(record.news(0, number, "b", "n", (1,)).buckets) == 2
    assert author.put(count=1)


@pytest.mark.hostile
def test_who_waits_for_all_lives_and_hears_of_the_end_before_it():
    record, author, number = begun(Record(lease_s=10))
    enter(record, number, a="1")
    for now in (0, 9):
        author.put(now, count=1)
        assert record.news(now, number, "a", "n", (0,), True) is None
    author.finish(9)
    news = record.news(18, number, "a", "n", (0,), True)
    assert news.done and news.counts and len(news.buckets) == 2
    assert not record.versions[number].fetching and record.decision(1000, number) is None


@pytest.mark.hostile
def test_where_nothing_is_kept_who_waited_for_all_says_that_it_has_them():
    record, author, number = begun(Record(keep=0))
    enter(record, number, a="1")
    author.put()
    author.finish()
    news = record.news(0, number, "a", "n", (0,), True)
    assert news.done and not news.counts
    assert record.collect(0, "node") == []
    record.took(0, number, "a", (2,))
    assert record.collect(0, "node") == [f"{number}/0/0", f"{number}/0/1"]
