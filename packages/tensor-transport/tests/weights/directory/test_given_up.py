"""What a directory does with versions, votes and plans of updates that are given up, or not begun by all."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from authors import PLAN, Author, enter
from models import assert_same, weights
from streaming import Generator, Trainer

from raycrew.tensor_transport.errors import StaleVersionError, UpdateAbortedError
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import (
    WeightDirectory,
    WeightPublisher,
    WeightReceiver,
    join_updates,
)
from raycrew.tensor_transport.weights._directory.actor import DirectoryActor
from raycrew.tensor_transport.weights._directory.directory import _LocalEdge
from raycrew.tensor_transport.weights._directory.record import Record
from raycrew.tensor_transport.weights._update.manifest import BucketPlan, TensorEntry

TIMEOUT_S = 60.0
OTHER = BucketPlan((TensorEntry("z", "uint8", (4,), 0, 0, 4),), (4,))


@pytest.mark.hostile
@pytest.mark.parametrize("end", ["abort", "deadline", "another"])
def test_a_version_that_is_given_up_before_it_begins_is_not_published_without_its_voters(end):
    record = Record(keep=1)
    authors = [Author(record, part, 2) for part in range(2)]
    for author in authors:
        author.publish(version=1)
    record.hold(0, "a", 1)
    number = record.reserve(0, ["1"], 5, "key")
    if end == "abort":
        record.abort(1, number, "a generator died")
    later = record.reserve(2, ["1"], None, "key") if end == "another" else None
    for author in authors:
        with pytest.raises(UpdateAbortedError, match=f"version {number} was given up"):
            author.begin(9)
    assert record.newest(9) == 1
    assert record.collect(9, "node") == [], "what all hold is kept"
    assert record.holders == {"a": 1}
    told = later or number + 1
    assert [author.begin(10, version=told) for author in authors] == [told, told], "each is told once"


@pytest.mark.hostile
def test_a_part_that_had_begun_is_not_told_again():
    record = Record()
    authors = [Author(record, part, 2) for part in range(2)]
    number = record.reserve(0, ["1"], None, "key")
    authors[0].begin()
    record.abort(0, number, "no room")
    assert authors[0].begin(version=number + 1) == number + 1
    with pytest.raises(UpdateAbortedError, match="no room"):
        authors[1].begin(version=number + 1)


def test_who_is_not_asked_any_more_publishes_what_it_likes():
    record = Record()
    author = Author(record)
    number = record.reserve(0, ["1"], None, "key")
    record.abort(0, number, "the trainer failed before it published")
    record.dismiss(0, number)
    assert author.publish() == number + 1
    record.dismiss(0, 99)


@pytest.mark.hostile
def test_a_publisher_that_was_restarted_is_not_told_of_what_the_one_before_was_asked_for():
    record = Record()
    author, survivor = Author(record, 0, 2), Author(record, 1, 2)
    late = record.reserve(0, ["1"], 5, "key")
    author.name = "restarted"
    record.enroll(9, 0, author.name, author.scope)
    assert record.reason(9, late) == "not all receivers had loaded it by its deadline"
    asked = record.reserve(9, ["1"], None, "key")
    assert author.begin(9) == asked
    with pytest.raises(UpdateAbortedError, match=f"version {late} was given up"):
        survivor.begin(9)
    assert survivor.begin(9) == asked


@pytest.mark.hostile
def test_parts_of_a_replaced_publisher_and_of_later_steps_are_not_joined():
    record = Record()
    first, second = Author(record, 0, 2), Author(record, 1, 2)
    assert second.publish(version=1) == 1
    again = Author(record, 0, 2, "again")
    assert "the publisher of part 0 was replaced" in record.reason(0, 1)
    assert again.publish(version=2) == 2
    assert record.newest(0) is None
    assert second.publish(version=2) == 2
    assert record.newest(0) == 2
    assert first.name == "publisher 0"


@pytest.mark.hostile
def test_a_version_whose_parts_have_not_all_begun_ends_with_the_lease():
    record = Record(lease_s=10)
    first, second = Author(record, 0, 2), Author(record, 1, 2)
    assert second.publish(version=1) == 1
    assert record.next_expiry() == 10
    assert first.begin(11, version=2) == 2, "a later step"
    assert "other parts are not begun" in record.reason(11, 1)


@pytest.mark.hostile
@pytest.mark.parametrize("directed", [True, False])
def test_a_part_that_nobody_asked_for_names_its_version(directed):
    store, directory = InProcessByteStore(), WeightDirectory.local() if directed else None
    publishers = [WeightPublisher(store, directory=directory, part=i, parts=2) for i in range(2)]
    with pytest.raises(ValueError, match=r"part 1 of 2 .* give version="):
        publishers[1].publish({"b": torch.ones(2)})
    assert not store.held
    for step in (3, 4):
        updates = [p.publish({n: torch.ones(2)}, version=step) for n, p in zip("ab", publishers, strict=True)]
        assert join_updates(updates).version == step


@pytest.mark.hostile
def test_who_failed_before_it_published_is_not_joined_to_the_step_before():
    store, directory = InProcessByteStore(), WeightDirectory.local()
    ranks = [WeightPublisher(store, directory=directory, part=i, parts=2, timeout_s=5) for i in range(2)]

    def publish(rank, step):
        ranks[rank].publish({f"rank {rank}": torch.full((2,), step)}, version=step)

    publish(0, 1)  # and rank 1 fails before it comes to that
    publish(1, 2)
    assert "part 1 goes on with version 2" in directory.status()[0].reason
    publish(0, 2)
    loaded = {}
    assert WeightReceiver(loaded.update, store=store, directory=directory).pull().version == 2
    assert {name: set(tensor.tolist()) for name, tensor in loaded.items()} == {"rank 0": {2}, "rank 1": {2}}
    with pytest.raises(StaleVersionError, match="the last version is 2"):
        publish(0, 1)


def test_a_version_for_receivers_waits_for_its_parts_until_its_deadline():
    record = Record(lease_s=10)
    first, second = Author(record, 0, 2), Author(record, 1, 2)
    number = record.reserve(0, ["1"], 100, "key")
    assert second.publish() == number
    late = Author(record, 0, 2, "made late")
    assert late.begin(50) == number
    assert first.name != late.name


@pytest.mark.hostile
def test_a_recipient_that_was_restarted_under_its_name_has_not_loaded_what_it_had():
    record = Record()
    author = Author(record)
    number = record.reserve(0, ["1", "2"], None)
    enter(record, number, a="1", b="2")
    author.publish()
    record.vote(0, number, "a", True, "")
    enter(record, number, a="1")
    record.vote(0, number, "b", True, "")
    assert record.decision(0, number) is None
    record.vote(0, number, "a", False, "no room")
    assert record.decision(0, number) == "aborted"


def test_a_pull_that_failed_reads_nothing_any_more():
    record = Record(keep=1)
    author = Author(record)
    author.publish()
    record.news(0, 1, "late", "n", (0,))
    record.vote(0, 1, "late", False, "no room")
    author.publish(1)
    assert author.begin(2) == 3, "nobody is waited for"


def test_a_plan_is_known_as_long_as_its_publisher_may_rely_on_it():
    record = Record()
    author = Author(record)
    author.publish()
    with pytest.raises(StaleVersionError, match="is not above it"):
        author.begin(version=1, plan=OTHER)
    assert record.offer(0, author.begin(plan=None, digest=PLAN.digest)).plans == (PLAN,)


def waiting_for_room(record):
    """A record whose publisher waits for room, which a receiver's next question gives."""
    number = record.reserve(0, ["1"], None)
    enter(record, number, a="1")
    author = Author(record)
    author.begin()
    author.put(count=1)
    assert record.credit(0, number, 0, "publisher 0", 4, 4) is None
    return (number, 0, author.name, 4, 4), (number, "a", "n", (1,))


@pytest.mark.hostile
def test_what_a_question_without_an_answer_changes_is_told_to_threads_that_wait_for_it():
    asked = threading.Event()

    class Heard(Record):
        def credit(self, *args):
            asked.set()
            return super().credit(*args)

    record = Heard(lease_s=1e9)
    credit, news = waiting_for_room(record)
    asked.clear()
    edge = _LocalEdge(record)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(edge.poll, "credit", credit, TIMEOUT_S)
        assert asked.wait(TIMEOUT_S)  # It has the lock until it waits.
        assert edge.poll("news", news, 0.0) is None
        assert waiting.result(TIMEOUT_S / 4)


@pytest.mark.hostile
def test_what_a_question_without_an_answer_changes_is_told_to_calls_that_wait_for_it():
    async def run():
        actor = DirectoryActor(1, 1e9, "auto")
        credit, news = waiting_for_room(actor._record)
        waiting = asyncio.create_task(actor.poll("credit", credit, TIMEOUT_S))
        await asyncio.sleep(0)
        assert await actor.poll("news", news, 0.0) is None
        return await asyncio.wait_for(waiting, TIMEOUT_S / 4)

    assert asyncio.run(run())


@pytest.mark.hostile
def test_what_is_committed_is_kept_when_what_it_replaces_cannot_be_released():
    class Store(InProcessByteStore):
        def release(self, ticket):
            if failures:
                raise failures.pop()
            super().release(ticket)

    store, directory, failures = Store(), WeightDirectory.local(), []
    trainer, generator = Trainer(store, directory), Generator(store, directory)
    trainer.publish_weights()
    trainer.seed = 1
    failures.append(OSError("the disk is gone"))
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.publish_weights()
    assert not failures
    assert generator.receiver.pull().version == directory.latest == 2
    assert_same(generator.model.tensors, weights(1))


@pytest.mark.hostile
def test_a_publisher_that_fails_does_not_wait_for_receivers_that_lag():
    """Nobody fetches the bucket that the one on its way waits for."""
    store, raised = InProcessByteStore(), []
    with WeightDirectory.local() as directory:
        publisher = WeightPublisher(
            store, directory=directory, window_bytes=1, bucket_bytes=64, timeout_s=None
        )
        number = directory.ask(Record.reserve, ["nobody"], None)

        def failing():
            yield from ((str(i), torch.ones(16)) for i in range(2))
            while not store.held:
                threading.Event().wait(0.001)
            yield "third", torch.ones(16)
            raise RuntimeError("the model is gone")

        def publish():
            try:
                publisher.publish(failing())
            except RuntimeError as error:
                raised.append(str(error))

        thread = threading.Thread(target=publish, daemon=True)
        thread.start()
        thread.join(60)
        assert raised == ["the model is gone"] and not store.held
        assert "the model is gone" in directory.ask(Record.reason, number)
