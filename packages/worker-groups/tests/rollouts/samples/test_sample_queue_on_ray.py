"""A queue in an actor, used by producers and consumers in other processes that may die."""

import asyncio
import contextlib
import pickle

import pytest
import ray
from patience import eventually

from raycrew.worker_groups import (
    SampleJournalError,
    SampleLeaseError,
    SampleQueue,
    SampleQueueClosedError,
    SampleQueueEndedError,
    SampleQueueTimeoutError,
)
from raycrew.worker_groups.rollouts.samples._channels import remote

COLUMNS = ["tokens", "reward"]


class User:
    """Whoever uses a queue from a process of its own."""

    def __init__(self, queue):
        self.queue = queue

    def produce(self, start, n, version=0):
        for i in range(start, start + n, 2):
            self.queue.put({"tokens": [[i], [i + 1]]}, version=version)

    def reward(self):
        try:
            while True:
                with self.queue.get(3, columns=["tokens"], adds=["reward"], at_least=1) as batch:
                    batch.add({"reward": [tokens[0] / 2 for tokens in batch["tokens"]]})
        except SampleQueueEndedError:
            return "ended"

    def take(self, n, lease_s):
        self.batch = self.queue.get(n, lease_s=lease_s)
        return self.batch.ids

    def take_reference(self):
        (reference,) = self.queue.get(1)["tokens"]
        return ray.get(reference)

    def close(self):
        self.queue.close()


def user(queue):
    return ray.remote(num_cpus=0)(User).remote(queue)


def get(ref):
    return ray.get(ref, timeout=100)


@pytest.fixture
def queue(local_ray):
    with SampleQueue.on_ray(COLUMNS, stale="drop", max_samples=8) as made:
        yield made


def test_producers_scorers_and_a_learner_in_processes_of_their_own(queue):
    producers, scorer = [user(queue) for _ in range(2)], user(queue)
    scored = scorer.reward.remote()
    produced = [producer.produce.remote(100 * i, 12) for i, producer in enumerate(producers)]
    seen = []
    while len(seen) < 24:  # more than fit at once
        with queue.get(5, at_least=1, max_staleness=0, timeout_s=60) as batch:
            assert batch["reward"] == [tokens[0] / 2 for tokens in batch["tokens"]]
            seen += [tokens[0] for tokens in batch["tokens"]]
    assert sorted(seen) == [*range(12), *range(100, 112)]
    get(produced)
    queue.end()
    assert get(scored) == "ended"
    with pytest.raises(SampleQueueEndedError):
        queue.get(1)
    stats = queue.stats()
    assert (stats.produced, stats.consumed, stats.held) == (24, 24, 0)


def test_the_samples_of_a_consumer_that_is_killed_come_back(queue):
    ids = queue.put({"tokens": [1, 2], "reward": [0, 0]}, version=0)
    doomed = user(queue)
    assert get(doomed.take.remote(2, 3.0)) == ids
    with pytest.raises(SampleQueueTimeoutError, match="2 are handed out"):
        queue.get(1, timeout_s=0)
    ray.kill(doomed)
    again = queue.get(2, timeout_s=60)
    assert again.ids == ids and queue.stats().returned == 2
    again.done()
    with pytest.raises(SampleLeaseError):
        again.done()


def test_a_queue_is_passed_on_and_ended_by_its_owner_alone(queue):
    copy = pickle.loads(pickle.dumps(queue))
    copy.close()
    with pytest.raises(SampleQueueClosedError) as closed:
        copy.stats()
    assert not closed.value.may_be_done
    get(user(queue).close.remote())
    assert queue.stats().held == 0
    with pytest.raises(ValueError, match="has no column"):
        queue.put({"x": [1]}, version=0)
    with pytest.raises(ValueError, match="more than max_samples=8"):
        queue.put({"tokens": range(9)}, version=0)
    with pytest.raises(ValueError, match="there never were samples"):
        queue.add([77], {"reward": [1.0]})
    with pytest.raises(TypeError, match="would lose its owner"):
        queue.put({"tokens": [{"inside": ray.put(1)}]}, version=0)
    queue.put({"tokens": [ray.put("a reference")], "reward": [0]}, version=0)
    assert get(user(queue).take_reference.remote()) == "a reference"


def test_coroutines_share_a_queue(queue):
    async def main():
        waiting = [asyncio.create_task(queue.get_async(2, timeout_s=60)) for _ in range(2)]
        given_up = asyncio.create_task(queue.get_async(1, lease_s=10_000))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        rows, keys = {"tokens": range(4), "reward": range(4)}, ["a", "b", "c", "d"]
        ids = await queue.put_async(rows, version=0, keys=keys)
        assert await queue.put_async(rows, version=0, keys=keys) == ids
        assert queue.known(["x", "d"]) == ["d"]
        batches = await asyncio.gather(*waiting)
        assert sorted(i for batch in batches for i in batch.ids) == ids
        for batch in batches:
            await batch.done_async()
        with pytest.raises(SampleQueueTimeoutError):
            await queue.get_async(1, timeout_s=0.1)

    asyncio.run(main())


def test_a_put_that_was_cancelled_while_it_waited_is_not_done_later(queue):
    def is_in_line():
        try:
            queue.put({"tokens": [0], "reward": [0]}, version=0, timeout_s=0)
        except SampleQueueTimeoutError as full:
            return "1 others wait for room before" in str(full)

    async def give_up():
        late = asyncio.create_task(queue.put_async({"tokens": ["late"], "reward": [0]}, version=0))
        await asyncio.to_thread(eventually, is_in_line, "it waits for room in the actor")
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)

    queue.put({"tokens": range(8), "reward": range(8)}, version=0)
    asyncio.run(give_up())
    queue.get(8).done()
    queue.put({"tokens": ["next"], "reward": [0]}, version=0, timeout_s=60)
    assert (queue.get(1)["tokens"], queue.stats().produced) == (["next"], 9)


def test_a_put_that_is_not_answered_may_be_done_and_is_not_done_later(queue, monkeypatch):
    queue.put({"tokens": range(8), "reward": range(8)}, version=0)
    with pytest.raises(SampleQueueTimeoutError, match="no room") as refused:
        queue.put({"tokens": ["refused"], "reward": [0]}, version=0, timeout_s=0)
    with monkeypatch.context() as patched:
        patched.setattr(remote, "ANSWER_S", 0.1 - remote.POLL_S)
        with pytest.raises(SampleQueueTimeoutError, match="did not answer") as unanswered:
            queue.put({"tokens": ["late"], "reward": [0]}, version=0)
    assert (refused.value.may_be_done, unanswered.value.may_be_done) == (False, True)
    queue.get(8).done()
    queue.put({"tokens": ["next"], "reward": [0]}, version=0, timeout_s=60)
    assert (queue.get(1)["tokens"], queue.stats().produced) == (["next"], 9)


def test_a_queue_whose_actor_died_says_so_and_its_folder_goes_on(local_ray, tmp_path):
    queue = SampleQueue.on_ray(COLUMNS, directory=tmp_path / "queue")
    queue.put({"tokens": [1, 2, 3], "reward": [0, 0, 0]}, version=4)
    queue.get(1).done()
    queue.get(1)
    ray.kill(queue._channel._actor)
    with pytest.raises(SampleQueueClosedError, match="died") as died:
        queue.get(3)  # which waits
    assert died.value.may_be_done, "a folder may have it"

    later = []

    def reopens():
        with contextlib.suppress(SampleJournalError):  # as long as the process is not gone
            later.append(SampleQueue.on_ray(COLUMNS, directory=tmp_path / "queue"))
        return later

    eventually(reopens, "the folder is free")
    with later[0] as later:
        assert later.get(2)["tokens"] == [2, 3] and later.stats().version == 4
    queue.close()
