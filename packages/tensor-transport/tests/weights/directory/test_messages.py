"""What is said to a directory: few messages one after another, and each of them once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import Model, assert_same, weights
from streaming import TIMEOUT_S, Generator, Trainer, at_a_pace, sync

from raycrew.tensor_transport.errors import UpdateAbortedError
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightDirectory, WeightPublisher, WeightReceiver
from raycrew.tensor_transport.weights._directory.directory import _LocalEdge
from raycrew.tensor_transport.weights._directory.record import Record
from raycrew.tensor_transport.weights._directory.versions import Begin, Finish


class Overheard(_LocalEdge):
    """Notes what is said through it; what is not waited for in brackets."""

    def __init__(self, record, said):
        super().__init__(record)
        self.said, self._own = said, threading.local()

    def ask(self, method, args, timeout_s):
        if not getattr(self._own, "within", False):
            self.said.append(method)
        return super().ask(method, args, timeout_s)

    def tell(self, method, args):
        self.said.append(f"({method})")
        self._within(super().tell, method, args)

    def poll(self, method, args, wait_s, said=None):
        self.said.append(f"{said[0]} + {method}" if said else method)
        return self._within(super().poll, method, args, wait_s, said)

    def _within(self, act, *args):
        self._own.within = True
        try:
            return act(*args)
        finally:
            self._own.within = False


def test_an_update_of_one_bucket_takes_few_messages_one_after_another():
    store, record = InProcessByteStore(), Record(1, 60.0, "auto")
    store.release_scope = ""  # As Ray's: nobody has to release anything.
    from_trainer, from_generator = [], []
    plain = WeightDirectory(_LocalEdge(record))
    lock = plain._edge._changed
    directories = [WeightDirectory(Overheard(record, said)) for said in (from_trainer, from_generator)]
    for directory in directories:
        directory._edge._changed = lock
    trainer, generator = Trainer(store, directories[0]), Generator(store, directories[1])
    trainer.publisher = WeightPublisher(store, directory=directories[0])
    sync([trainer], [generator], plain, publish="publish_mapping")
    del from_trainer[:], from_generator[:]
    sync([trainer], [generator], plain, publish="publish_mapping")
    assert_same(generator.model.tensors, weights(0))
    assert from_trainer == ["publish"]
    assert from_generator == ["offer", "vote + outcome"]


def of_many_buckets(store, said):
    """A publisher of ten buckets, in whose directory `said` is said; and that directory's record."""
    record = Record(1, 60.0, "auto")
    directory = WeightDirectory(Overheard(record, said))
    return WeightPublisher(store, directory=directory, bucket_bytes=64, timeout_s=TIMEOUT_S), record


MANY = {f"w{i}": torch.full((16,), float(i)) for i in range(10)}


@pytest.mark.parametrize(("each_s", "count"), [(0.0, 10), (3600.0, 1)])
def test_buckets_that_are_put_fast_are_announced_together(monkeypatch, each_s, count):
    """What can be released is told with what is said anyway."""
    at_a_pace(monkeypatch, each_s)
    store, said = InProcessByteStore(), []
    publisher, record = of_many_buckets(store, said)
    for number in (1, 2):
        del said[:]
        assert len(publisher.publish(MANY).buckets) == 10
        assert said[-count - 2 :] == ["start", *["announce"] * count, "end"]
        places = [announced.place for announced in record.versions[number].buckets]
        assert places == list(range(1, 11)) and len(store.held) == 10
    model = Model()
    with WeightReceiver(model.load, store=store, directory=publisher._teller._directory) as receiver:
        receiver.pull()
    assert_same(model.tensors, MANY)


@pytest.mark.hostile
def test_who_makes_a_tensor_as_it_is_asked_for_is_not_waited_for(monkeypatch):
    """The next bucket may take any time."""
    at_a_pace(monkeypatch, 3600.0)
    said = []
    of_many_buckets(InProcessByteStore(), said)[0].publish(iter(MANY.items()))
    assert said.count("announce") == 10


@pytest.mark.hostile
def test_what_is_not_announced_yet_is_before_receivers_are_waited_for(monkeypatch):
    at_a_pace(monkeypatch, 3600.0)
    store, record = InProcessByteStore(), Record(1, 60.0, "auto")
    directory = WeightDirectory(_LocalEdge(record))
    trainer, generator = Trainer(store, directory, window_bytes=1), Generator(store, directory)
    for _ in range(2):
        sync([trainer], [generator], directory, publish="publish_mapping")
    assert len(record.versions[2].buckets) > 2
    assert_same(generator.model.tensors, weights(0))


@pytest.mark.hostile
def test_nothing_stays_of_a_version_that_fails_before_all_is_announced(monkeypatch):
    at_a_pace(monkeypatch, 3600.0)
    store, said, put = InProcessByteStore(), [], InProcessByteStore.put
    publisher, record = of_many_buckets(store, said)

    def full(self, data):
        if len(self.held) == 5:
            raise OSError("no space left")
        return put(self, data)

    monkeypatch.setattr(InProcessByteStore, "put", full)
    with pytest.raises(OSError, match="no space left"):
        publisher.publish(MANY)
    assert said.count("announce") == 1 and not store.held
    assert record.versions[1].state == "aborted"


@pytest.mark.hostile
def test_a_vote_that_waits_for_the_decision_counts_once():
    """A receiver that is made again takes it back, though its process before still waits."""
    voted = threading.Event()

    class Heard(Record):
        def vote(self, *args):
            super().vote(*args)
            voted.set()

    record = Heard(lease_s=1e9)
    edge = _LocalEdge(record)
    edge.ask("enroll", (0, "publisher", ""), TIMEOUT_S)
    number = edge.ask("reserve", (["ballot"], None), TIMEOUT_S)
    edge.ask("begin", (Begin(0, 1, "publisher", "", None, "", None, None),), TIMEOUT_S)
    offer = (number, frozenset(), "generator", "ballot")
    vote = ("vote", (number, "generator", True, ""))
    edge.ask("offer", offer, TIMEOUT_S)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(edge.poll, "decision", (number,), TIMEOUT_S, vote)
        assert voted.wait(TIMEOUT_S)
        edge.ask("offer", offer, TIMEOUT_S)
        edge.ask("finish", (number, Finish(0, "publisher", 0, None, 0.0, 0.0, ())), TIMEOUT_S)
        assert record.versions[number].state == "complete", "nobody that lives has loaded it"
        edge.ask(*vote, TIMEOUT_S)
        assert waiting.result(TIMEOUT_S) == "committed"


def updated(record, **options):
    """What a generator says in an update, the second one; the generator."""
    store, said = InProcessByteStore(), []
    store.release_scope = ""
    plain, heard = WeightDirectory(_LocalEdge(record)), WeightDirectory(Overheard(record, said))
    heard._edge._changed = plain._edge._changed
    trainer, generator = Trainer(store, plain), Generator(store, heard)
    for seed in range(2):
        del said[:]
        trainer.seed = seed
        sync([trainer], [generator], plain, publish="publish_mapping", **options)
    assert_same(generator.model.tensors, weights(1))
    return said, generator


def test_what_is_prepared_is_not_read_anew_when_it_is_applied():
    record = Record(1, 60.0, "auto")
    said, _ = updated(record, prepare="prepare_weights")
    assert said[-2:] == ["offer", "vote + outcome"]
    version = record.versions[2]
    assert version.is_taken(version.buckets[-1]) and not version.fetching
    (taken,) = version.taken.values()
    assert taken == (len(version.buckets),)


@pytest.mark.hostile
def test_who_applies_what_it_holds_already_reads_nothing_and_is_not_missed():
    record = Record(1, 60.0, "auto")
    said, generator = updated(record)
    del said[:]
    assert generator.apply_weights(2).size_bytes == 0
    assert said == ["offer", "hold"]
    assert not record.versions[2].fetching
    assert record.holders == {generator.receiver.name: 2}


@pytest.mark.hostile
def test_a_part_that_can_not_be_put_gives_the_version_up_for_the_other_ranks():
    store, directory = InProcessByteStore(), WeightDirectory.local()
    first, second = (WeightPublisher(store, directory=directory, part=i, parts=2) for i in range(2))
    put = store.put

    def full(data):
        store.put = put
        raise OSError("no space left")

    store.put = full
    with pytest.raises(OSError, match="no space left"):
        first.publish({"a": torch.ones(4)}, version=1)
    with pytest.raises(UpdateAbortedError, match="part 0: its publisher raised OSError"):
        second.publish({"b": torch.ones(4)}, version=1)
    assert not store.held
    for publisher, name in ((first, "a"), (second, "b")):
        publisher.publish({name: torch.ones(4)}, version=2)
    assert directory.latest == 2


def test_a_partial_version_is_read_once_it_is_known_that_it_can_be_added():
    """A receiver may have to come to what it is added to first, which takes any time."""
    record = Record(2, 60.0, "auto")
    directory = WeightDirectory(_LocalEdge(record))
    publisher = WeightPublisher(InProcessByteStore(), directory=directory)
    publisher.publish({"a": torch.ones(4), "b": torch.ones(4)})
    publisher.publish({"a": torch.zeros(4)}, partial=True)
    whole, partial = (
        directory.ask(Record.offer, number, frozenset(), "receiver", "", "node") for number in (1, 2)
    )
    assert len(whole.news.buckets) == 1 and whole.news.done
    assert partial.news is None and not record.versions[2].fetching


@pytest.mark.parametrize("each_s", [0.0, 3600.0])
def test_what_is_had_of_a_complete_version_is_said_from_time_to_time_and_in_the_end(monkeypatch, each_s):
    """Buckets of shared memory are had faster than a directory answers; whoever waits for them hears it."""
    at_a_pace(monkeypatch, each_s)
    store, record, said = InProcessByteStore(), Record(1, 60.0, "auto"), []
    trainer = Trainer(store, WeightDirectory(_LocalEdge(record)))
    generator = Generator(store, WeightDirectory(Overheard(record, said)))
    trainer.publish_weights()
    version = record.versions[1]
    count = len(version.buckets)
    assert count > 2
    generator.apply_weights(1)
    assert said.count("(took)") == (count if each_s == 0.0 else 1) and "took" not in said
    assert version.taken[generator.receiver.name] == (count,) and not version.fetching
    assert_same(generator.model.tensors, weights(0))
