"""Who waits for samples or for room gets them, or is told why not."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
from patience import PATIENCE_S

from raycrew.worker_groups.errors import SampleQueueEndedError, SampleQueueTimeoutError
from raycrew.worker_groups.rollouts.samples import SampleQueue


def test_who_scores_gets_what_there_is_where_no_more_can_come():
    """The trainer waits for the rest to be scored, the producer for room, and the scorer for the producer."""
    with SampleQueue(["tokens", "reward"], max_samples=10) as queue, ThreadPoolExecutor(2) as threads:

        def produce():
            for _ in range(12):
                queue.put({"tokens": [1] * 5}, version=0, timeout_s=60)
            queue.end()

        def score():
            while True:
                with queue.get(7, adds=["reward"], timeout_s=60) as batch:
                    batch.add({"reward": [0.0] * batch.size})

        made, scored = threads.submit(produce), threads.submit(score)
        sizes = []
        with pytest.raises(SampleQueueEndedError):
            while True:
                with queue.get(10, timeout_s=60) as batch:
                    sizes.append(batch.size)
        assert sum(sizes) == 60
        made.result(60)
        with pytest.raises(SampleQueueEndedError):
            scored.result(60)


def test_who_waits_in_vain_where_all_is_too_old_and_no_room_is_left_is_told_once(caplog):
    async def main():
        trainer = asyncio.create_task(queue.get_async(1, max_staleness=1))
        producer = asyncio.create_task(queue.put_async({"tokens": [3]}, version=5))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not trainer.done() and not producer.done()
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "only 0 of the 2 samples that it holds are for a get() of at least 1 with max" in caplog.text
        queue.discard(max_staleness=1)
        await producer
        assert (await trainer)["tokens"] == [3]

    with SampleQueue(["tokens"], max_samples=2) as queue:
        queue.put({"tokens": [1, 2]}, version=0)
        queue.advance(5)
        asyncio.run(main())


def test_only_who_takes_samples_out_waits_in_vain(caplog):
    with SampleQueue(["tokens", "reward"], max_samples=10) as queue:
        queue.put({"tokens": [1] * 6, "reward": [0] * 6}, version=0)
        with pytest.raises(SampleQueueTimeoutError):
            queue.put({"tokens": [1] * 5}, version=0, timeout_s=0)
        for wanted in ({"adds": ["reward"]}, {"timeout_s": 0}):
            assert not caplog.records
            with pytest.raises(SampleQueueTimeoutError):
                queue.get(6 + len(wanted), **{"timeout_s": 0, **wanted})
        with pytest.raises(SampleQueueTimeoutError):
            queue.get(8, timeout_s=0)
        assert "only 6 of the 6 samples that it holds are for a get() of at least 7" in caplog.text
        assert len(caplog.records) == 1


def test_why_nothing_came_is_told_exactly(caplog):
    def told(use):
        with pytest.raises(SampleQueueTimeoutError) as late:
            use()
        return str(late.value)

    with SampleQueue(["tokens", "reward"], name="q", max_samples=3) as queue:
        queue.put({"tokens": [1, 2]}, version=1)
        queue.get(1, columns=["tokens"])
        end = (
            "that nobody has, and 0 more that are too old at version 1; it holds 2, of which 1 are handed out"
        )
        assert told(lambda: queue.get(1, timeout_s=0)) == f"q has 0 of 1 samples with tokens, reward {end}"
        needs = {"columns": ["tokens"], "adds": ["reward"], "timeout_s": 0}
        lacking = "q has 1 of 2 samples with tokens and without reward"
        assert told(lambda: queue.get(2, **needs)) == f"{lacking} {end}"
        assert told(lambda: queue.resume(1, timeout_s=0)) == f"q has 0 of 1 parts of rollouts {end}"
        none = told(lambda: queue.get(2, columns=[], timeout_s=0))
        assert none == f"q has 1 of 2 samples with any column {end}"
        full = told(lambda: queue.put({"tokens": [3, 4]}, version=1, timeout_s=0))
        assert full.startswith(
            "q has no room for 2 samples more: it holds 2 (1 handed out, 0 parts of rollouts)"
        )
        assert full.endswith("bounded by max_samples=3 and max_memory=None")


@pytest.mark.parametrize("n", [1, 2])
def test_who_gets_enough_of_a_full_queue_is_warned_of_nothing(caplog, n):
    with SampleQueue(["tokens"], max_samples=2) as queue:
        queue.put({"tokens": [1, 2]}, version=0)
        with pytest.raises(SampleQueueTimeoutError):
            queue.put({"tokens": [3]}, version=0, timeout_s=0)
        assert queue.get(n, at_least=n, timeout_s=0).size == n
    assert not caplog.records


@pytest.mark.parametrize("timeout_s", [float("nan"), "1", True])
def test_a_timeout_that_is_none_is_refused_at_once(timeout_s):
    with SampleQueue(["tokens"]) as queue:
        with pytest.raises((TypeError, ValueError), match="timeout_s"):
            queue.put({"tokens": [1]}, version=0, timeout_s=timeout_s)
        assert queue.stats().held == 0
        with pytest.raises((TypeError, ValueError), match="timeout_s"):
            asyncio.run(queue.get_async(1, timeout_s=timeout_s))


def test_no_batch_has_more_samples_than_it_may_have():
    with SampleQueue(["tokens"]) as queue, pytest.raises(ValueError, match="at_least=3 is more than"):
        queue.get(2, at_least=3)


@pytest.fixture
def rescoring():
    columns = ["tokens", "logprobs", "reward"]
    with SampleQueue(columns, stale="rescore", rescored=["logprobs"]) as queue:
        yield queue


def score(queue, version):
    with queue.get(1, adds=["logprobs"], timeout_s=0) as batch:
        batch.add({"logprobs": ["anew"]}, version=version)


def test_at_the_end_too_old_samples_are_scored_before_anybody_is_told_that_none_is_left(rescoring):
    rescoring.put({"tokens": [1], "logprobs": ["old"], "reward": [0]}, version=0)
    rescoring.advance(5)
    rescoring.end()
    trainer = {"max_staleness": 1, "timeout_s": 0}
    with pytest.raises(SampleQueueEndedError):
        rescoring.get(1, adds=["logprobs"], timeout_s=0)  # nobody has asked for young ones so far
    with pytest.raises(SampleQueueTimeoutError):
        rescoring.get(1, **trainer)
    score(rescoring, 5)
    rescoring.advance(9)
    with pytest.raises(SampleQueueTimeoutError):
        rescoring.get(1, adds=["logprobs"], timeout_s=0)
    with pytest.raises(SampleQueueTimeoutError):
        rescoring.get(1, **trainer)
    score(rescoring, 9)
    rescoring.get(1, **trainer).done()
    for wanted in ({"adds": ["logprobs"]}, {}):
        with pytest.raises(SampleQueueEndedError):
            rescoring.get(1, timeout_s=0, **wanted)


def test_at_the_end_a_too_old_sample_that_lacks_another_column_is_waited_for(rescoring):
    ids = rescoring.put({"tokens": [1], "logprobs": ["old"]}, version=0)
    rescoring.advance(5)
    rescoring.end()
    for _ in range(2):
        with pytest.raises(SampleQueueTimeoutError):
            rescoring.get(1, max_staleness=1, timeout_s=0)
        rescoring.add(ids, {"reward": [1]})
    score(rescoring, 5)
    assert rescoring.get(1, max_staleness=1, timeout_s=0)["logprobs"] == ["anew"]


def test_a_version_that_a_put_tells_of_while_it_waits_is_heard_by_whoever_waits_for_samples():
    async def main():
        producers = [asyncio.create_task(queue.put_async({"tokens": [3]}, version=0))]
        await asyncio.sleep(0)  # and nothing changes with a second one, as the queue is full already
        trainer = asyncio.create_task(queue.get_async(2, max_staleness=0))
        scorer = asyncio.create_task(queue.get_async(1, adds=["logprobs"], columns=["reward"]))
        await asyncio.sleep(0)
        producers.append(asyncio.create_task(queue.put_async({"tokens": [4]}, version=1)))
        async with asyncio.timeout(PATIENCE_S):
            batch = await scorer
        assert batch.ids == [0]
        for task in (*producers, trainer):
            task.cancel()
        await asyncio.gather(*producers, trainer, return_exceptions=True)

    columns = ["tokens", "logprobs", "reward"]
    with SampleQueue(columns, stale="rescore", rescored=["logprobs"], max_samples=2) as queue:
        queue.put({"tokens": [1], "logprobs": ["old"], "reward": [0]}, version=0)
        queue.put({"tokens": [2], "logprobs": ["old"]}, version=0)
        asyncio.run(main())


def test_who_scores_is_not_told_of_the_end_while_samples_may_still_become_too_old(rescoring):
    async def main():
        trainer = asyncio.create_task(rescoring.get_async(2, max_staleness=1))
        await asyncio.sleep(0)
        rescoring.end()
        scorer = asyncio.create_task(rescoring.get_async(1, adds=["logprobs"], columns=["reward"]))
        await asyncio.sleep(0)
        assert not scorer.done() and not trainer.done()
        rescoring.advance(2)
        async with asyncio.timeout(PATIENCE_S):
            assert (await scorer).ids == [0]
        trainer.cancel()

    rescoring.put({"tokens": [1], "logprobs": ["old"], "reward": [0]}, version=0)
    rescoring.put({"tokens": [2], "logprobs": ["old"]}, version=0)
    asyncio.run(main())


@pytest.mark.parametrize("wanted", ["parts", "rewards"])
def test_at_the_end_nobody_waits_for_what_is_scored_anew_and_can_not_be_theirs(rescoring, wanted):
    rescoring.put({"tokens": [1], "logprobs": ["old"], "reward": [0]}, version=0)
    rescoring.advance(2)
    with pytest.raises(SampleQueueTimeoutError):
        rescoring.get(1, max_staleness=0, timeout_s=0)
    rescoring.end()
    with pytest.raises(SampleQueueEndedError):
        if wanted == "parts":
            rescoring.resume(1, timeout_s=0)
        else:
            rescoring.get(1, adds=["reward"], timeout_s=0)


def test_prompts_are_of_no_age_until_they_have_tokens():
    with SampleQueue(["tokens"], stale="drop") as queue:
        queue.put({"tokens": [[], [1]]}, version=0, lengths=[0, 1], partial=True)
        queue.put({"tokens": [[]]}, version=0, lengths=[0])
        queue.advance(9)
        assert queue.discard(5) == 2, "a part of a rollout, and a sample without tokens"
        with queue.resume(1, max_staleness=0, timeout_s=0) as prompts:
            assert (prompts.ids, prompts.versions_behind) == ([0], [0])
            queue.end()
            with pytest.raises(SampleQueueTimeoutError):  # it may come, and be young
                queue.get(1, max_staleness=0, timeout_s=0)
            prompts.put({"tokens": [[1]]}, version=9, lengths=[1])
        assert queue.get(1, max_staleness=0, timeout_s=0).versions_behind == [0]


def test_parts_of_rollouts_are_not_scored_before_they_are_whole(rescoring):
    rescoring.put({"tokens": [[1]], "logprobs": [[-1]]}, version=0, lengths=[1], partial=True)
    rescoring.advance(5)
    with pytest.raises(SampleQueueTimeoutError):
        rescoring.resume(1, max_staleness=1, timeout_s=0)
    with rescoring.resume(1) as parts:
        assert parts["logprobs"] == [[-1]]
        whole = {"tokens": [[1, 2]], "logprobs": [[-1, -2]], "reward": [0]}
        parts.put(whole, version=5, lengths=[2])
    with pytest.raises(SampleQueueTimeoutError):
        rescoring.get(1, max_staleness=1, timeout_s=0)
    score(rescoring, 5)
    assert rescoring.get(1, max_staleness=1, timeout_s=0).versions_behind == [0]


@pytest.mark.parametrize("stale", ["keep", "drop"])
def test_at_the_end_nobody_waits_for_what_is_too_old_where_nothing_is_scored_anew(stale):
    with SampleQueue(["tokens", "reward"], stale=stale) as queue:
        queue.put({"tokens": [1]}, version=0)
        queue.advance(5)
        queue.end()
        with pytest.raises(SampleQueueEndedError):
            queue.get(1, max_staleness=1, timeout_s=0)
        with pytest.raises(SampleQueueEndedError):
            queue.get(1, adds=["tokens"], timeout_s=0)


def test_at_the_end_parts_of_rollouts_may_yet_be_whole_and_too_old_and_scored(rescoring):
    trainer, scorer = {"max_staleness": 1, "timeout_s": 0}, {"adds": ["logprobs"], "timeout_s": 0}
    part = {"tokens": [[1]], "logprobs": [[-1]], "reward": [0]}
    rescoring.put(part, version=0, lengths=[1], partial=True)
    with pytest.raises(SampleQueueTimeoutError):
        rescoring.get(1, **trainer)
    rescoring.end()
    for _ in range(2):
        for wanted in (trainer, scorer):
            with pytest.raises(SampleQueueTimeoutError):
                rescoring.get(1, **wanted)
        rescoring.advance(5)
    with pytest.raises(SampleQueueEndedError):
        rescoring.resume(1, **trainer)  # nobody scores parts
    with rescoring.resume(1) as parts:
        parts.put({**part, "tokens": [[1, 2]], "logprobs": [[-1, -2]]}, version=5, lengths=[2])
    with pytest.raises(SampleQueueTimeoutError):
        rescoring.get(1, **trainer)
    score(rescoring, 5)
    rescoring.get(1, **trainer).done()
    for wanted in (trainer, scorer):
        with pytest.raises(SampleQueueEndedError):
            rescoring.get(1, **wanted)
