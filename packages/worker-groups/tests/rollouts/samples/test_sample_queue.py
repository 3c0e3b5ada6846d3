"""A queue of one process, as its producers and consumers use it."""

import asyncio
import itertools
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from raycrew.worker_groups._health import observed
from raycrew.worker_groups.errors import (
    SampleLeaseError,
    SampleQueueClosedError,
    SampleQueueEndedError,
    SampleQueueTimeoutError,
)
from raycrew.worker_groups.rollouts.samples import SampleQueue, SampleStats


class Handle:
    """Stands for rows that are elsewhere."""

    def __init__(self, rows):
        self.rows = list(rows)

    def __len__(self):
        return len(self.rows)

    def select(self, rows):
        return Handle([self.rows[i] for i in rows])

    def join_rows(self, others):
        return Handle([row for handle in (self, *others) for row in handle.rows])


@pytest.fixture
def queue():
    with SampleQueue(["tokens", "reward"]) as made:
        yield made


def put(queue, *tokens, version=0, **options):
    return queue.put({"tokens": tokens, "reward": [0.0] * len(tokens)}, version=version, **options)


def test_columns_come_at_different_times_and_from_different_places(queue):
    ids = queue.put({"tokens": [[1, 2], [3], [4]]}, version=0)
    with pytest.raises(SampleQueueTimeoutError, match=r"0 of 1 samples with tokens, reward .*it holds 3"):
        queue.get(1, timeout_s=0)
    with queue.get(2, adds=["reward"]) as batch:
        assert batch.ids == ids[:2] and list(batch) == ["tokens"]
        with pytest.raises(SampleQueueTimeoutError, match="without reward"):
            queue.get(2, adds=["reward"], timeout_s=0)
        assert batch.add({"reward": [0.5, 1.0]}) == []
    assert queue.add([ids[2]], {"reward": [2.0]}) == []
    assert queue.add([ids[2]], {"reward": [9.0]}) == [ids[2]], "the first one counts"
    with queue.get(3) as batch:
        assert dict(batch) == {"tokens": [[1, 2], [3], [4]], "reward": [0.5, 1.0, 2.0]}
    assert queue.stats().held == 0 and queue.stats().consumed == 3
    assert queue.add(ids, {"reward": [1, 2, 3]}) == ids, "they are gone"


def test_what_a_consumer_does_not_finish_is_handed_out_again(queue):
    ids = put(queue, 1, 2, 3, 4)
    with pytest.raises(ZeroDivisionError), queue.get(4) as batch:
        batch.done(ids[:1])
        1 / 0  # noqa: B018
    assert queue.get(3).ids == ids[1:]
    assert (queue.stats().consumed, queue.stats().returned, queue.stats().leased) == (1, 3, 3)


def test_a_batch_whose_lease_ends_belongs_to_the_next_consumer(queue):
    put(queue, 1, 2)
    late = queue.get(2, lease_s=0.01)
    again = queue.get(2, timeout_s=60)  # woken by the end of the lease alone
    assert again.ids == late.ids
    with pytest.raises(SampleLeaseError, match="handed out again"):
        late.done()
    again.done()
    with pytest.raises(SampleLeaseError):
        again.done()


def test_a_lease_that_is_renewed_goes_on(queue):
    put(queue, 1)
    batch = queue.get(1, lease_s=1.0)
    batch.renew(100)
    with pytest.raises(SampleQueueTimeoutError):
        queue.get(1, timeout_s=1.5)
    batch.done()


def test_too_old_samples_are_kept_for_others_or_dropped():
    for stale, dropped in (("keep", 0), ("drop", 2)):
        with SampleQueue(["tokens", "reward"], stale=stale) as queue:
            put(queue, 1, 2, version=3)
            young = put(queue, 3, version=5)
            queue.advance(6)
            batch = queue.get(1, max_staleness=1)
            assert batch.ids == young and batch.versions_behind == [1]
            with pytest.raises(SampleQueueTimeoutError, match=f"{2 - dropped} more that are too old"):
                queue.get(1, max_staleness=2, timeout_s=0)
            assert queue.stats().dropped == dropped and queue.stats().held == 3 - dropped
            assert queue.discard(max_staleness=1) == 2 - dropped and queue.stats().dropped == 2


def test_too_old_samples_are_scored_anew():
    with SampleQueue(["tokens", "logprobs"], stale="rescore", rescored=["logprobs"]) as queue:
        ids = queue.put({"tokens": [1, 2], "logprobs": [-1.0, -2.0]}, version=1)
        queue.advance(4)
        with pytest.raises(SampleQueueTimeoutError):
            queue.get(2, max_staleness=1, timeout_s=0)
        with queue.get(2, adds=["logprobs"]) as batch:
            assert batch["tokens"] == [1, 2] and "logprobs" not in batch
            with pytest.raises(ValueError, match="`version` has to be said"):
                batch.add({"logprobs": [-3.0, -4.0]})
            batch.add({"logprobs": [-3.0, -4.0]}, version=SimpleNamespace(version=4))
        queue.advance(5)
        batch = queue.get(2, max_staleness=1)
        assert batch.ids == ids and batch["logprobs"] == [-3.0, -4.0] and batch.versions_behind == [1, 1]
        assert [run.version for runs in batch.runs for run in runs] == [1, 1], (
            "who made them is not forgotten"
        )
        assert queue.stats().rescored == 2


def test_an_interrupted_rollout_goes_on_under_newer_weights(queue):
    whole = put(queue, [9], version=3, lengths=[1])
    ids = put(queue, [1, 2], [3], version=3, lengths=[2, 1], partial=True)
    assert queue.stats().partial == 2
    assert queue.get(1, at_least=1).ids == whole
    with pytest.raises(SampleQueueTimeoutError):
        queue.get(1, timeout_s=0)
    with queue.resume(8) as parts:
        assert parts.ids == ids and parts["tokens"] == [[1, 2], [3]]
        parts.put({"tokens": [[1, 2, 5, 6], [3]]}, version=4, lengths=[4, 1], partial=True)
    with queue.resume(8) as parts:
        with pytest.raises(ValueError, match="had 4 tokens before, and has 3 now"):
            parts.put({"tokens": [[1, 2, 5], [3, 7]]}, version=5, lengths=[3, 2])
        parts.put({"tokens": [[1, 2, 5, 6], [3, 7]]}, version=5, lengths=[4, 2])
    queue.advance(6)
    with pytest.raises(SampleQueueTimeoutError):
        queue.get(2, max_staleness=2, timeout_s=0)
    batch = queue.get(2, max_staleness=3)
    assert [batch.token_versions(i) for i in range(2)] == [[3, 3, 4, 4], [3, 5]]
    assert batch["tokens"] == [[1, 2, 5, 6], [3, 7]]


def test_a_shuffled_queue_hands_out_the_same_order_again():
    def order(seed):
        with SampleQueue(["tokens", "reward"], shuffle_seed=seed) as queue:
            for start in range(0, 100, 7):
                put(queue, *range(start, start + 7))
            return [queue.get(15)["tokens"] for _ in range(7)]

    assert order(1) == order(1) != order(2)
    assert sorted(x for batch in order(1) for x in batch) == list(range(105))


def test_producers_wait_for_room():
    with SampleQueue(["tokens", "reward"], max_samples=3) as queue, ThreadPoolExecutor(1) as threads:
        put(queue, 1, 2)
        with pytest.raises(SampleQueueTimeoutError, match=r"no room for 2 samples more: .*max_samples=3"):
            put(queue, 3, 4, timeout_s=0)
        with pytest.raises(ValueError, match="more than max_samples"):
            put(queue, 1, 2, 3, 4)
        with pytest.raises(ValueError, match="there never are 4 samples"):
            queue.get(4)
        waiting = threads.submit(put, queue, 3, 4)
        queue.get(1).done()
        assert waiting.result(60) == [2, 3]
        assert queue.stats().produced == 4, "what found no room has no trace"


@pytest.mark.parametrize("operation", ["put", "get"])
def test_who_waits_tries_again_only_when_something_has_changed(operation):
    with SampleQueue(["tokens"], max_samples=2) as queue:
        queue.put({"tokens": [1, 2]}, version=0)
        held = queue.get(2)
        keeper, tries = queue._channel._keeper, []
        try_once = getattr(keeper, operation)
        setattr(keeper, operation, lambda **arguments: tries.append(1) or try_once(**arguments))
        with pytest.raises(SampleQueueTimeoutError):
            if operation == "put":
                queue.put({"tokens": [3]}, version=0, timeout_s=0.3)
            else:
                queue.get(1, timeout_s=0.3)
        assert len(tries) < 5
        held.done()


def test_who_waits_is_not_woken_by_those_who_only_look():
    async def main():
        waiting = asyncio.create_task(queue.get_async(1))
        for _ in range(5):
            await asyncio.sleep(0)
        before = len(tries)
        for _ in range(5):
            queue.stats(), queue.known(["a"])
            await asyncio.sleep(0)
        assert len(tries) == before > 0
        queue.put({"tokens": [1]}, version=0)
        assert (await waiting)["tokens"] == [1]

    with SampleQueue(["tokens"]) as queue:
        keeper, tries = queue._channel._keeper, []
        get = keeper.get
        keeper.get = lambda **arguments: tries.append(1) or get(**arguments)
        asyncio.run(main())


def test_memory_is_bounded_and_the_newest_rows_go_to_disk(tmp_path):
    row = bytes(8000)
    with SampleQueue(["tokens", "reward"], max_memory="0.1MB") as queue:
        put(queue, *[row] * 10)
        with pytest.raises(SampleQueueTimeoutError, match="max_memory=0"):
            put(queue, *[row] * 4, timeout_s=0)
    with SampleQueue(["tokens", "reward"], max_memory="0.1MB", spill=tmp_path) as queue:
        for i in range(10):
            put(queue, *[bytes([i]) * 8000] * 10)
        stats = queue.stats()
        assert stats.in_memory_bytes <= 100_000 < 600_000 < stats.on_disk_bytes
        assert list(tmp_path.iterdir()) == [], "nothing is left behind by whoever is killed"
        batch = queue.get(100)
        assert batch["tokens"] == [bytes([i // 10]) * 8000 for i in range(100)]
        batch.done()
        assert queue.stats().in_memory_bytes == queue.stats().on_disk_bytes == 0


def test_memory_is_flat():
    with SampleQueue(["tokens", "reward"], max_samples=512) as queue:
        versions = itertools.count()

        def turn(n):
            for version in itertools.islice(versions, n):
                put(queue, *range(64), version=version)
                queue.get(32, max_staleness=2).done()
                with queue.get(32, columns=["tokens", "reward"]) as batch:
                    batch.done()

        turn(50)
        tracemalloc.start()
        try:
            turn(100)
            before = tracemalloc.get_traced_memory()[0]
            turn(200)
            assert tracemalloc.get_traced_memory()[0] < before + 50_000
        finally:
            tracemalloc.stop()


def test_at_the_end_consumers_get_what_is_left_and_then_are_told(queue):
    put(queue, 1, 2, 3)
    first = queue.get(2)
    queue.end()
    with pytest.raises(SampleQueueEndedError):
        put(queue, 4)
    with pytest.raises(SampleQueueTimeoutError):
        queue.get(2, timeout_s=0)  # the first two may come back
    first.done()
    with queue.get(2) as rest:
        assert rest["tokens"] == [3]
    with pytest.raises(SampleQueueEndedError, match="no more such samples"):
        queue.get(2)


def test_who_waits_is_told_that_the_queue_was_closed():
    queue = SampleQueue(["tokens"])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(queue.get, 1)
        queue.close()
        with pytest.raises(SampleQueueClosedError):
            waiting.result(60)
    queue.close()
    with pytest.raises(SampleQueueClosedError):
        queue.stats()


def test_many_threads_get_each_sample_once():
    with SampleQueue(["tokens", "reward"], max_samples=64) as queue, ThreadPoolExecutor(8) as threads:
        seen, lock = [], threading.Lock()

        def produce(start):
            for i in range(start, start + 200, 5):
                put(queue, *range(i, i + 5))

        def consume():
            while True:
                try:
                    batch = queue.get(7)
                except SampleQueueEndedError:
                    return
                with lock:
                    seen.extend(batch["tokens"])
                batch.done()

        consumers = [threads.submit(consume) for _ in range(4)]
        for producer in [threads.submit(produce, 200 * i) for i in range(4)]:
            producer.result(60)
        queue.end()
        for consumer in consumers:
            consumer.result(60)
        assert sorted(seen) == list(range(800))


def test_coroutines_wait_without_blocking_their_loop(queue):
    async def main():
        waiting = asyncio.create_task(queue.get_async(2))
        given_up = asyncio.create_task(queue.get_async(2))
        with pytest.raises(SampleQueueTimeoutError):
            await queue.resume_async(1, timeout_s=0.01)
        given_up.cancel()
        ids = await queue.put_async({"tokens": [1, 2]}, version=0)
        async with await queue.get_async(2, adds=["reward"]) as batch:
            await batch.add_async({"reward": [1.0, 2.0]})
        async with await waiting as batch:
            assert batch.ids == ids
        with pytest.raises(asyncio.CancelledError):
            await given_up

    asyncio.run(main())
    assert queue.stats().consumed == 2


def test_coroutines_are_answered_as_threads_are(queue):
    async def main():
        ids = await queue.put_async({"tokens": [1, 2, 3]}, version=0)
        assert await queue.add_async(ids[:1], {"reward": [1.0]}) == []
        assert await queue.add_async(ids[:1], {"reward": [2.0]}) == ids[:1]
        async with await queue.get_async(2, adds=["reward"]) as scored:
            assert await scored.add_async({"reward": [1.0, 1.0]}) == []
            assert not scored._open
        async with await queue.get_async(3) as batch:
            await batch.done_async(ids[:1])
            await batch.give_back_async(ids[1:2])
            assert list(batch._open) == ids[2:]
        stats = queue.stats()
        assert (stats.consumed, stats.returned, stats.held, stats.leased) == (2, 1, 1, 0)
        part = await queue.put_async({"tokens": [[1]]}, version=0, lengths=[1], partial=True)
        async with await queue.resume_async(1) as parts:
            queue._channel._keeper._ledger.drop(queue._channel._keeper._ledger.samples[part[0]])
            assert await parts.put_async({"tokens": [[1, 2]]}, version=0, lengths=[2]) == part, "it is gone"

    asyncio.run(main())


def test_a_queue_and_a_batch_say_what_they_are():
    with SampleQueue(["tokens", "reward"], max_samples=4, name="prompts") as queue:
        assert (queue.name, queue.columns, queue.max_samples) == ("prompts", ["tokens", "reward"], 4)
        put(queue, 1, 2)
        assert repr(queue.get(1)) == "SampleBatch(1 samples, columns tokens, reward)"
        assert repr(queue.get(1, columns=[])) == "SampleBatch(1 samples, columns none)"


def test_coroutines_go_on_with_the_parts_that_there_are_and_end_them(queue):
    async def main():
        ids = await queue.put_async({"tokens": [[1], [2]]}, version=0, lengths=[1, 1], partial=True)
        async with await queue.resume_async(8, timeout_s=60) as parts:
            assert parts.ids == ids
            await parts.put_async({"tokens": [[1, 3], [2]]}, version=1, lengths=[2, 1])
        assert queue.stats().partial == 0

    asyncio.run(main())


def test_what_was_handed_to_a_caller_who_no_longer_waits_goes_back(queue, monkeypatch):
    put(queue, 1)
    ask = queue._channel.ask

    def interrupted(request, timeout_s):
        ask(request, timeout_s)
        raise KeyboardInterrupt

    monkeypatch.setattr(queue._channel, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        queue.get(1)
    monkeypatch.undo()
    assert queue.stats().leased == 0


def test_a_column_of_handles_comes_as_one_handle_on_just_the_rows(queue):
    queue.put({"tokens": Handle("abc"), "reward": [1, 2, 3]}, version=0)
    queue.put({"tokens": Handle("de"), "reward": [4, 5]}, version=0)
    assert queue.get(2)["tokens"].rows == ["a", "b"]
    rest = queue.get(3)["tokens"]
    assert isinstance(rest, Handle) and rest.rows == ["c", "d", "e"]
    queue.put({"tokens": Handle("f"), "reward": [6]}, version=0)
    queue.put({"tokens": [Handle("gh")], "reward": [7]}, version=0)
    mixed = queue.get(2)["tokens"]
    assert [handle.rows for handle in mixed] == [["f"], ["g", "h"]]


def test_rows_come_back_as_copies(queue):
    row = [0, 0]
    put(queue, row)
    row[:] = 1, 1
    assert queue.get(1)["tokens"][0] == [0, 0]


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"tokens": [1], "reward": [1, 2]}, {}, "one row for each sample"),
        ({"tokens": "abc"}, {}, "a sequence of rows or a handle on them, not str"),
        ({"tokens": [1], "advantage": [1]}, {}, "has no column 'advantage', but tokens, reward"),
        ({}, {}, "none at all"),
        ({"tokens": [1]}, {"lengths": [1, 2]}, "2 numbers for 1 samples"),
        ({"tokens": [1]}, {"partial": True}, "need `lengths`"),
        ({"tokens": [1]}, {"version": -1}, "not negative"),
        ({"tokens": [1]}, {"version": SimpleNamespace(version=None)}, "no version of the weights yet"),
        ({"tokens": [1]}, {"version": "new"}, "a whole number"),
    ],
)
def test_what_can_not_be_put_is_refused_before_anything_is(queue, columns, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        queue.put(columns, **{"version": 0, **options})
    assert queue.stats().produced == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": []}, "1 to 62 columns"),
        ({"name": None}, "what the queue is called"),
        ({"columns": "tokens"}, "a sequence of names"),
        ({"columns": ["a", "a"]}, "twice"),
        ({"stale": "old"}, "keep, drop, rescore"),
        ({"stale": "rescore"}, "`rescored` names columns"),
        ({"rescored": ["reward"]}, "`rescored` names columns"),
        ({"spill": True}, "max_memory"),
        ({"spill": "", "max_memory": 1}, "spill is True, False or a folder"),
        ({"spill": None}, "spill is True, False or a folder"),
        ({"max_memory": "much"}, "max_memory"),
        ({"max_samples": 0}, "at least 1"),
        ({"lease_s": 0}, "above 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        SampleQueue(**{"columns": ["tokens", "reward"], **options})


def test_whoever_observes_the_process_is_told_of_samples(queue, monkeypatch):
    counts, spans = [], []
    observer = SimpleNamespace(counted=lambda *count: counts.append(count), spanned=spans.append)
    put(queue, 1, 2, version=1)
    monkeypatch.setattr(observed, "by", observer)
    queue.advance(3)
    queue.get(2).done()
    assert ("samples", {"queue": "samples", "what": "handed_out"}, 2) in counts
    assert ("samples", {"queue": "samples", "what": "consumed"}, 2) in counts
    assert ("sample_versions_behind", {"queue": "samples"}, 4) in counts
    assert [what for name, what, s in counts if name == "sample_waited_seconds" and s > 0] == [
        {"queue": "samples"}
    ]
    assert not [count for count in counts if count[1].get("what") == "produced"], "that was before"
    assert [(span.track, span.row, span.name) for span in spans] == [("samples", "samples", "get")]


def test_a_batch_is_there_even_without_columns():
    with SampleQueue(["tokens", "reward"]) as queue:
        put(queue, 1)
        batch = queue.get(1, columns=[])
        assert batch and (len(batch), batch.size) == (0, 1)


def test_columns_that_are_added_say_nothing_of_the_weights_unless_that_is_said(queue):
    ids = queue.put({"tokens": [1, 2]}, version=0)
    queue.add(ids[:1], {"reward": [1.0]})
    assert queue.stats().version == 0
    queue.add(ids[1:], {"reward": [1.0]}, version=3)
    assert queue.stats().version == 3


def test_samples_that_never_were_are_named(queue):
    (last,) = queue.put({"tokens": [1]}, version=0)
    for wrong in (-1, last + 1):
        with pytest.raises(ValueError, match=rf"there never were samples \[{wrong}\]"):
            queue.add([last, wrong], {"reward": [1.0, 2.0]})
    assert queue.add([last], {"reward": [1.0]}) == []


def test_a_queue_to_which_nothing_has_happened_counts_nothing():
    with SampleQueue(["tokens"]) as queue:
        assert queue.stats() == SampleStats()


@pytest.mark.parametrize(("handed_out", "behind", "waited_s"), [(0, 0.0, 0.0), (1, 6.0, 3.0), (4, 1.5, 0.75)])
def test_means_are_of_what_was_handed_out(handed_out, behind, waited_s):
    stats = SampleStats(
        handed_out=handed_out, versions_behind=6 if handed_out else 0, waited_s=3.0 if handed_out else 0.0
    )
    assert (stats.mean_versions_behind, stats.mean_waited_s) == (behind, waited_s)


def test_samples_are_scored_anew_once_all_that_was_lost_is_there_again():
    rescored = ["logprobs", "reward"]
    with SampleQueue(["tokens", *rescored], stale="rescore", rescored=rescored) as queue:
        queue.put({"tokens": [1], "logprobs": [-1.0], "reward": [0.5]}, version=1)
        queue.advance(4)
        with pytest.raises(SampleQueueTimeoutError):
            queue.get(1, max_staleness=1, timeout_s=0)
        for column, version in zip(rescored, (5, 4), strict=True):
            with queue.get(1, adds=[column]) as batch:
                batch.add({column: [1.0]}, version=version)
            if column == "logprobs":
                with pytest.raises(SampleQueueTimeoutError):
                    queue.get(1, max_staleness=1, timeout_s=0)
        assert queue.get(1, max_staleness=1).versions_behind == [1], "counted from the older of both"


def test_a_length_is_not_negative():
    with SampleQueue(["tokens"]) as queue:
        with pytest.raises(ValueError, match="a length"):
            queue.put({"tokens": [1, 2]}, version=0, lengths=[3, -1])
        assert queue.put({"tokens": [1]}, version=0, lengths=[0]) == [0]


def test_who_asks_for_more_is_told_how_many_there_are_of_any_age():
    with SampleQueue(["tokens"], stale="keep") as queue:
        queue.put({"tokens": [1, 2, 3]}, version=1)
        queue.put({"tokens": [4, 5]}, version=4)
        told = r"2 of 3 samples with tokens.*3 more that are too old at version 4; it holds 5"
        with pytest.raises(SampleQueueTimeoutError, match=told):
            queue.get(3, max_staleness=1, timeout_s=0)


def test_only_the_newest_may_be_asked_for():
    with SampleQueue(["tokens"]) as queue:
        queue.put({"tokens": [1]}, version=1)
        newest = queue.put({"tokens": [2]}, version=2)
        assert queue.get(1, max_staleness=0).ids == newest
