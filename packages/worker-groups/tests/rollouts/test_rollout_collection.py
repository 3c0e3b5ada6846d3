"""Collections over workers of this process: what is pulled when, handed out how, and where it goes."""

import asyncio
import gc
import json
import random
import signal
import sys
import threading
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from patience import eventually
from ray import cloudpickle

from raycrew.worker_groups import WorkerGroupClosedError, WorkerGroupError
from raycrew.worker_groups._health import observed
from raycrew.worker_groups.balancing import WorkerLoad
from raycrew.worker_groups.rollouts import (
    PromptError,
    RolloutCollection,
    RolloutFailedError,
    RolloutFileError,
    RolloutSample,
    SampleQueue,
)
from raycrew.worker_groups.rollouts._delivery import delivery as delivering
from raycrew.worker_groups.rollouts._delivery.delivery import Delivery
from raycrew.worker_groups.rollouts._delivery.jsonl import JsonLines
from raycrew.worker_groups.rollouts._delivery.progress import Progress
from raycrew.worker_groups.rollouts._engine.engine import Bounds, Engine
from raycrew.worker_groups.rollouts._engine.prompts import Prompts
from raycrew.worker_groups.rollouts._in_worker.worker import RolloutWorker
from raycrew.worker_groups.rollouts._telling import Tally
from raycrew.worker_groups.rollouts._values import Call, Wishes


class FakeCalls:
    """Workers whose rollouts end in any order."""

    is_source_late = False

    def __init__(self, rollout, wishes, wake):
        self.worker, self.wishes, self.wake = RolloutWorker(cloudpickle.dumps((rollout, None))), wishes, wake
        self.worker._rollout = rollout  # not a copy
        self.held, self.most, self.abandoned = [0, 0], 0, []
        self.random = random.Random(0)

    def loads(self):
        return [WorkerLoad(rank, n) for rank, n in enumerate(self.held)]

    def next_alone(self):
        return None

    def send(self, rank, item):
        self.held[rank] += 1
        self.most = max(self.most, *self.held)
        return rank, item.value

    def wait(self, sent):
        if not sent:
            self.wake.wait(0.01)
            self.wake.clear()
            return []
        return [self.random.choice(sent)]

    def collect(self, sent):
        rank, task = sent
        self.held[rank] -= 1
        call = Call(task.which, task.prompt.data, 10.0, 1.0, False)
        return task, asyncio.run(self.worker.run(call, self.wishes))

    def abandon(self, sent):
        self.abandoned += sent


def collect(
    rollout, prompts, *, ids=None, folder=None, jsonl=None, queue=None, n=1, in_flight=4, on_error="raise"
):
    progress = Progress(folder, {"n": n})
    with ExitStack() as undone:
        undone.callback(progress.close)
        lines = None if jsonl is None else JsonLines(jsonl, is_synced=False)
        wishes = Wishes(lines is not None, None if queue is None else tuple(queue.columns))
        wake = threading.Event()
        calls = FakeCalls(rollout, wishes, wake)
        written = None if lines is None else lines.ids
        stream, bounds = Prompts(prompts, ids, wake.set), Bounds(n, 2, in_flight)
        engine = Engine(calls, stream, progress, written, bounds, on_error, wake, Tally("pool"))
        delivery = Delivery(progress.run, lines, queue, lambda: engine.is_stopped)
        made = RolloutCollection(engine, progress, delivery)
        made.calls = calls
        undone.pop_all()
    return made


async def doubled(prompt):
    return prompt * 2


async def picky(prompt):
    if prompt == 3:
        raise ValueError("not three")
    return prompt


def test_each_prompt_comes_once_with_its_samples_in_order():
    counts = iter(range(100))

    async def numbered(prompt):
        return prompt, next(counts)

    with collect(numbered, range(20), n=3) as collection:
        groups = list(collection)
    assert sorted(int(group.id) for group in groups) == list(range(20))
    assert all(group.prompt == int(group.id) and not group.failures for group in groups)
    assert all([prompt for prompt, _ in group.samples] == [group.prompt] * 3 for group in groups)
    assert len({n for group in groups for _, n in group.samples}) == 60
    assert collection.calls.most <= 2
    stats = collection.stats()
    assert (stats.pulled, stats.produced, stats.handed_out) == (20, 60, 20)
    assert (stats.in_flight, stats.waiting, stats.oldest_s) == (0, 0, 0.0) and stats.mean_s > 0


def test_whoever_observes_the_process_is_told_of_rollouts(monkeypatch):
    counts, spans, seconds = Counter(), [], []

    def counted(name, labels, value):
        if labels == {"pool": "pool"}:
            seconds.append((name, value))
        elif labels.get("pool") == "pool":
            counts[name, labels["what"]] += value

    monkeypatch.setattr(observed, "by", SimpleNamespace(counted=counted, spanned=spans.append))
    with collect(picky, range(5), n=2, on_error="return") as collection:
        assert len(list(collection)) == 5
    told = {"pulled": 5, "done": 5, "produced": 8, "failed": 2, "handed_out": 5}
    assert counts == {("rollouts", what): n for what, n in told.items()}
    assert len(seconds) == 5 and all(name == "rollout_seconds" and s > 0 for name, s in seconds)
    drawn = [(span.row, span.name) for span in spans if span.track == "rollouts"]
    assert sorted(drawn) == [("pool", str(prompt)) for prompt in range(5)]


def test_no_prompts_are_no_groups():
    assert list(collect(doubled, [])) == []
    assert collect(doubled, iter(())).run().pulled == 0


def test_a_failed_rollout_ends_the_collection_or_leaves_its_place_empty():
    with pytest.raises(RolloutFailedError, match="not three") as caught:
        list(collect(picky, range(9)))
    assert (caught.value.id, caught.value.sample, caught.value.kind) == ("3", 0, "raised")
    groups = {group.id: group for group in collect(picky, range(5), n=2, on_error="return")}
    assert groups["2"].samples == (2, 2) and groups["3"].samples == (None, None)
    assert set(groups["3"].failures) == {0, 1} and "not three" in groups["3"].failures[1].message


def test_what_was_begun_when_the_stream_raised_is_handed_out_first():
    def broken():
        yield from range(3)
        raise OSError("the stream")

    seen = []
    with pytest.raises(PromptError, match="the stream"):
        seen.extend(group.id for group in collect(doubled, broken()))
    seen = []
    with pytest.raises(PromptError):
        for group in collect(doubled, broken()):
            seen.append(group.id)
    assert sorted(seen) == ["0", "1", "2"]


def test_no_more_prompts_are_pulled_than_there_is_room_for():
    pulled = []

    def endless():
        while True:
            pulled.append(len(pulled))
            yield pulled[-1]

    with collect(doubled, endless(), in_flight=3) as collection:
        eventually(lambda: collection.stats().waiting == 3, "three that are done")
        assert len(pulled) == 3
        next(collection)
        next(collection)  # the first one was taken
        eventually(lambda: collection.stats().pulled == 4, "room for another")
        assert len(pulled) == 4


def test_a_collection_in_coroutines_leaves_the_loop_alone():
    async def main():
        arriving, seen = asyncio.Queue(), []

        async def prompts():
            while (prompt := await arriving.get()) is not None:
                yield prompt

        async with collect(doubled, prompts()) as collection:
            for prompt in (1, 2):
                await arriving.put(prompt)
                seen.append((await anext(collection)).samples[0])
            await arriving.put(None)
            async for _ in collection:
                raise AssertionError
        return seen

    assert asyncio.run(main()) == [2, 4]


def test_a_collection_that_is_given_up_goes_on_in_its_folder(tmp_path):
    with collect(doubled, range(30), folder=tmp_path) as collection:
        first = [next(collection).id for _ in range(5)]
    with collect(doubled, range(30), folder=tmp_path) as collection:
        rest = [group.id for group in collection]
    assert rest[0] == first[-1], "the one that was in hand comes again"
    assert sorted(first[:-1] + rest, key=int) == [str(i) for i in range(30)]
    with collect(doubled, range(31), folder=tmp_path) as collection:
        assert [group.id for group in collection] == ["30"]
        assert collection.stats().skipped == 30


def test_a_collection_that_is_abandoned_without_a_word_gives_its_folder_back(tmp_path):
    collection = collect(doubled, range(30), folder=tmp_path)
    del collection
    gc.collect()
    for _group in collect(doubled, range(30), folder=tmp_path):
        break
    gc.collect()
    assert len(list(collect(doubled, range(30), folder=tmp_path))) == 30


def test_lines_and_samples_come_once_wherever_it_ends(tmp_path, monkeypatch):
    """Ended in the middle of a delivery, after each of its steps."""

    async def sample(prompt):
        return RolloutSample({"tokens": [prompt]}, version=prompt % 2, length=1)

    def where():
        return {"folder": tmp_path / "run", "jsonl": tmp_path / "out.jsonl", "queue": queue, "n": 2}

    class StopError(Exception):
        pass

    def ends(*_, **__):
        raise StopError

    queue = SampleQueue(["tokens"])
    steps = [(JsonLines, "add"), (SampleQueue, "put"), (Engine, "handed_out")]
    put = SampleQueue.put

    def put_and_end(self, columns, **options):
        put(self, columns, **options)
        if self is queue:
            raise StopError

    replaced = {"add": ends, "put": put_and_end, "handed_out": ends}
    for kind, step in steps:
        with monkeypatch.context() as patched, pytest.raises(StopError):
            patched.setattr(kind, step, replaced[step])
            collect(sample, range(12), **where()).run()
    collect(sample, range(12), **where()).run()
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(int(line["id"]) for line in lines) == list(range(12))
    assert all(line["samples"][1]["tokens"] == [int(line["id"])] for line in lines)
    batch = queue.get(100, at_least=1)
    assert sorted(batch["tokens"]) == sorted([[i] for i in range(12)] * 2)
    versions = [batch.token_versions(i)[0] for i in range(batch.size)]
    assert versions == [tokens[0] % 2 for tokens in batch["tokens"]]


def test_prompts_that_have_a_line_are_not_rolled_out_again_without_a_folder_either(tmp_path):
    out = tmp_path / "out.jsonl"
    collect(doubled, ["a", "b"], ids=str, jsonl=out).run()
    stats = collect(doubled, ["b", "c", "a"], ids=str, jsonl=out).run()
    assert (stats.pulled, stats.skipped, stats.produced) == (3, 2, 1)
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()][-1] == "c"
    assert len(out.read_text().splitlines()) == 3


def test_samples_of_one_prompt_may_be_of_several_versions_and_some_may_have_failed(tmp_path):
    async def sample(prompt):
        made.append(prompt)
        if len(made) == 2:
            raise ValueError("the second")
        return RolloutSample({"tokens": "x"}, version=len(made))

    made, queue = [], SampleQueue(["tokens"])
    collect(sample, [1], queue=queue, n=4, on_error="return").run()
    batch = queue.get(9, at_least=1)
    assert sorted(batch.runs[i][0].version for i in range(batch.size)) == [1, 3, 4]


def test_a_full_queue_holds_the_stream_up_and_nothing_is_lost():
    async def sample(prompt):
        return RolloutSample({"tokens": prompt}, version=0)

    queue, seen = SampleQueue(["tokens"], max_samples=2), []
    collection = collect(sample, range(10), queue=queue)
    running = threading.Thread(target=collection.run)
    running.start()
    eventually(lambda: queue.stats().held == 2, "a full queue")
    while len(seen) < 10:
        with queue.get(1, timeout_s=60) as batch:
            seen += batch["tokens"]
    running.join(60)
    assert sorted(seen) == list(range(10)) and not running.is_alive()


def test_two_collections_in_one_folder_or_file_are_refused(tmp_path):
    with collect(doubled, range(3), folder=tmp_path / "run"), pytest.raises(RolloutFileError, match="in use"):
        collect(doubled, range(3), folder=tmp_path / "run")
    with collect(doubled, range(3), jsonl=tmp_path / "out"), pytest.raises(RolloutFileError, match="in use"):
        collect(doubled, range(3), jsonl=tmp_path / "out", folder=tmp_path / "run")
    collect(doubled, range(3), jsonl=tmp_path / "out", folder=tmp_path / "run").close()


def test_a_full_disk_ends_the_collection_and_another_goes_on(tmp_path, monkeypatch):
    add = JsonLines._write

    def full(self, line):
        if len(self.ids) == 2:
            raise OSError(28, "No space left on device")
        add(self, line)

    where = {"folder": tmp_path / "run", "jsonl": tmp_path / "out.jsonl"}
    with monkeypatch.context() as patched:
        patched.setattr(JsonLines, "_write", full)
        with pytest.raises(RolloutFileError, match="No space left"):
            collect(doubled, range(8), **where).run()
    collect(doubled, range(8), **where).run()
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 8


def test_a_full_disk_of_the_folder_is_told_of_too(tmp_path, monkeypatch):
    add, kept = Progress.add, set()

    def full(self, done):
        if done.id == "5":
            raise RolloutFileError("No space left on device")
        add(self, done)
        kept.add(done.id)

    with monkeypatch.context() as patched:
        patched.setattr(Progress, "add", full)
        with pytest.raises(RolloutFileError, match="No space left"):
            collect(doubled, range(20), folder=tmp_path).run()
    made = []

    async def noted(prompt):
        made.append(str(prompt))
        return prompt * 2

    stats = collect(noted, range(20), folder=tmp_path).run()
    assert stats.pulled == 20 == stats.skipped + stats.produced and stats.skipped == len(kept)
    assert "5" not in kept and sorted([*made, *kept], key=int) == [str(n) for n in range(20)]


def is_in(function, thread):
    """Whether a thread is in a function, or in what that has called."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def test_an_interrupt_while_nothing_comes_gives_the_folder_back(tmp_path):
    go_on, main = threading.Event(), threading.main_thread().ident

    def slow():
        yield 1
        go_on.wait(60)

    def interrupt():
        eventually(lambda: is_in(Progress.take, main), "it waits for more")
        signal.pthread_kill(main, signal.SIGINT)

    collection = collect(doubled, slow(), folder=tmp_path)
    next(collection)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which who runs this may ignore
    try:
        with pytest.raises(KeyboardInterrupt):
            threading.Thread(target=interrupt, daemon=True).start()
            next(collection)
    finally:
        signal.signal(signal.SIGINT, before)
    go_on.set()
    assert collect(doubled, [1, 2], folder=tmp_path).run().skipped == 1


def test_whoever_waits_in_another_thread_is_told_of_the_end():
    go_on = threading.Event()
    collection, told = collect(doubled, iter(go_on.wait, True)), []

    def wait():
        try:
            next(collection)
        except WorkerGroupError as error:
            told.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.2)
    collection.close()
    waiting.join(60)
    go_on.set()
    assert len(told) == 1


def test_who_asks_for_more_of_a_collection_that_was_closed_is_told_so():
    """Else a loop that somebody else has ended would look as one that got all."""
    collection, seen = collect(doubled, range(100)), []
    with pytest.raises(WorkerGroupClosedError, match="before its end"):
        for group in collection:
            seen.append(group)
            if len(seen) == 3:
                closing = threading.Thread(target=collection.close)
                closing.start()
                closing.join(60)
    with pytest.raises(WorkerGroupClosedError):
        collection.run()
    with pytest.raises(TypeError, match="stays in its process"):
        cloudpickle.dumps(collection)
    ended = collect(doubled, range(3))
    assert len(list(ended)) == 3 and list(ended) == []
    assert ended.run().handed_out == 3

    async def main():
        collection = collect(doubled, range(100))
        async for _ in collection:
            await collection.aclose()

    with pytest.raises(WorkerGroupClosedError):
        asyncio.run(main())


def test_a_loop_that_reads_the_prompts_is_not_blocked():
    async def prompts():
        yield 1

    async def main():
        with collect(doubled, prompts()) as collection:
            with pytest.raises(RuntimeError, match="`async for`"):
                next(collection)
            seen = [group.samples[0] async for group in collection]
        with collect(doubled, prompts()) as collection, pytest.raises(RuntimeError, match="`async for`"):
            collection.run()
        with collect(doubled, [3]) as collection:
            assert collection.run().produced == 1  # of no loop
        return seen

    assert asyncio.run(main()) == [2]


@pytest.mark.parametrize("n_lost", [1, 5])
def test_a_file_that_has_lost_lines_of_what_the_folder_has_is_refused(tmp_path, n_lost):
    """What is done is not rolled out again, so that these would be nowhere."""
    out = tmp_path / "out.jsonl"
    where = {"folder": tmp_path / "run", "jsonl": out}
    with collect(doubled, range(10), **where) as collection:
        for _ in range(6):
            next(collection)
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[n_lost:]))
    with pytest.raises(RolloutFileError, match="the file has no line of it"):
        collect(doubled, range(10), **where).run()
    out.write_text("".join(lines[:n_lost]) + out.read_text())
    collect(doubled, range(10), **where).run()
    assert sorted(json.loads(line)["id"] for line in out.read_text().splitlines()) == list("0123456789")


def test_a_disk_that_fills_up_is_the_folders_error_whoever_writes(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    collection = collect(doubled, range(50), folder=tmp_path)
    next(collection)
    with monkeypatch.context() as patched, pytest.raises(RolloutFileError, match="No space left"):
        patched.setattr("os.pwrite", full)
        list(collection)
    assert collect(doubled, range(50), folder=tmp_path).run().pulled == 50


def test_a_rollout_that_cancels_itself_has_failed_and_no_other():
    async def cancelled(prompt):
        if prompt == 1:
            asyncio.current_task().cancel()
        await asyncio.sleep(0)
        return prompt

    groups = {group.id: group for group in collect(cancelled, range(3), on_error="return")}
    assert groups["0"].samples == (0,) and groups["2"].samples == (2,)
    assert groups["1"].failures[0].kind == "raised" and "cancelled" in groups["1"].failures[0].message


def test_rollouts_that_nobody_makes_room_for_are_told_of(monkeypatch, caplog):
    """Where the loop that takes them from the queue is the one that waits here, say."""

    async def sample(prompt):
        return RolloutSample({"tokens": prompt}, version=0)

    monkeypatch.setattr(delivering, "_TRY_S", 0.01)
    queue = SampleQueue(["tokens"], max_samples=1)
    collection = collect(sample, range(3), queue=queue)

    def run():
        with pytest.raises(WorkerGroupError):
            collection.run()

    running = threading.Thread(target=run)
    running.start()
    eventually(lambda: "to go to their queue" in caplog.text, "a warning")
    collection.close()
    running.join(60)
    assert not running.is_alive() and queue.stats().held == 1
