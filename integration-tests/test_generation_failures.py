"""What a generation worker does when its engine fails, at an update or at a step."""

import asyncio
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

pytest.importorskip("transformers")

from generation_echo import MODEL, EchoEngine, EchoTrainer, EchoWorker
from generation_stage import Shelf, batch_of, local_stage, rows_of

from generation import EngineFailedError, GenerationError, Sampling
from generation.calls import Asked, admitted, samples_of
from generation.engine import WeightSource
from generation.life import EngineLife
from raycrew.tensor_transport import StaleWeightsError, WeightDirectory, WeightUpdateError
from raycrew.tensor_transport.integrations.vllm import GreedyReference, WeightCheckError

LONG = {"max_tokens": 300}


@pytest.fixture
def stage():
    with local_stage(EchoWorker, MODEL, EchoTrainer) as made:
        yield made


def engine_of(stage):
    return stage.worker._life.awake.loop.engine


def under_way(stage):
    future = stage.begin(batch_of(), LONG)
    stage.wait_for(lambda found: found.running)
    return future


def test_a_failed_update_leaves_the_version_before_and_samples_go_on(stage):
    future = under_way(stage)
    engine_of(stage).loads_to_fail = 1
    with pytest.raises(WeightUpdateError):
        stage.sync()
    assert {version for row in rows_of(future.result(60)) for version in row[4]} == {1}
    assert stage.metrics().weight_version == 1
    stage.sync()
    (row, *_) = rows_of(stage.generate(batch_of(), {"max_tokens": 2}))
    assert set(row[4]) == {int(row[3][0])} == {stage.version}


def test_a_mixture_ends_samples_with_an_error_and_is_repaired_by_an_update(stage):
    future = under_way(stage)
    engine_of(stage).loads_to_fail = 2
    with pytest.raises(WeightUpdateError):
        stage.sync()
    with pytest.raises(WeightUpdateError):
        future.result(60)
    with pytest.raises(StaleWeightsError, match="mixture"):
        stage.generate(batch_of())
    assert stage.metrics().weight_version is None
    stage.sync()
    (row, *_) = rows_of(stage.generate(batch_of(), {"max_tokens": 2}))
    assert set(row[4]) == {int(row[3][0])} == {stage.version}


@contextmanager
def update_under_way(stage, monkeypatch):
    """In the middle of a load, which ends with this context; gives the future of the update."""
    engine, begun, goes_on = engine_of(stage), threading.Event(), threading.Event()
    load = engine.load_weights

    def load_slowly(weights):
        taken = list(weights)
        begun.set()
        assert goes_on.wait(60)
        load(taken)

    monkeypatch.setattr(engine, "load_weights", load_slowly)
    with ThreadPoolExecutor() as pool:
        updated = pool.submit(stage.sync)
        assert begun.wait(60)
        try:
            yield updated
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), stage.loop).result(60)  # calls have begun
        finally:
            goes_on.set()


@pytest.mark.hostile
def test_a_call_that_comes_during_an_update_has_the_weights_after_it(stage, monkeypatch):
    with update_under_way(stage, monkeypatch) as updated:
        late = stage.begin(batch_of(), {"max_tokens": 2})
    (row, *_) = rows_of(late.result(60))
    assert set(row[4]) == {int(row[3][0])} == {updated.result(60)} == {2}


@pytest.mark.hostile
def test_a_call_that_comes_during_an_update_that_leaves_a_mixture_ends_with_an_error(stage, monkeypatch):
    engine_of(stage).loads_to_fail = 2
    with update_under_way(stage, monkeypatch) as updated:
        late = stage.begin(batch_of())
    with pytest.raises((WeightUpdateError, StaleWeightsError)):
        late.result(60)
    with pytest.raises(WeightUpdateError):
        updated.result(60)


@pytest.mark.hostile
def test_a_call_that_comes_during_an_update_waits_for_it_also_after_a_mixture(stage, monkeypatch):
    engine_of(stage).loads_to_fail = 2
    with pytest.raises(WeightUpdateError):
        stage.sync()
    for _ in ("the one that repairs it", "any later one"):
        with monkeypatch.context() as patched, update_under_way(stage, patched) as updated:
            late = stage.begin(batch_of(), {"max_tokens": 2})
        (row, *_) = rows_of(late.result(60))
        assert set(row[4]) == {updated.result(60)}


@pytest.mark.hostile
@pytest.mark.parametrize("error", [None, WeightUpdateError("it was given up")])
def test_a_call_that_comes_during_the_first_update_ends_where_that_brings_nothing(error):
    begun, goes_on = threading.Event(), threading.Event()

    def bring_nothing(receiver):
        begun.set()
        assert goes_on.wait(60)
        if error is not None:
            raise error
        return receiver.pull(missing_ok=True)

    async def call_meanwhile(life):
        update = asyncio.create_task(asyncio.to_thread(life.update, bring_nothing, "continue"))
        assert await asyncio.to_thread(begun.wait, 60)
        loop, requests = await admitted(life, Asked({"prompt_ids": [[5]]}, Sampling(), None, None))
        asyncio.get_running_loop().call_later(0.1, goes_on.set)
        async with asyncio.timeout(30):
            with pytest.raises((WeightUpdateError, StaleWeightsError), match=r"given up|no version"):
                await anext(samples_of(loop, requests))
        await asyncio.gather(update, return_exceptions=True)

    source = WeightSource(WeightDirectory.local(), Shelf())
    life = EngineLife(EchoEngine, lambda: source)
    try:
        asyncio.run(call_meanwhile(life))
    finally:
        life.sleep("abort")


@pytest.mark.hostile
@pytest.mark.timeout(60)
def test_a_sleep_before_the_first_version_waits_for_no_call_that_came_just_before_it(monkeypatch):
    life = EngineLife(EchoEngine, lambda: WeightSource(WeightDirectory.local(), Shelf()))
    loop = life.awake.loop
    pause, came = loop.pause, threading.Event()

    def pause_late(*args):
        assert came.wait(30)
        return pause(*args)

    async def call_meanwhile():
        sleep = asyncio.create_task(asyncio.to_thread(life.sleep, "finish"))
        while not life._changes.locked():
            await asyncio.sleep(0.001)
        asked = Asked({"prompt_ids": [[5]]}, Sampling(max_tokens=2), None, None)
        loop, requests = await admitted(life, asked)
        asyncio.get_running_loop().call_later(0.1, came.set)
        ((_, sample),) = [one async for one in samples_of(loop, requests)]
        await sleep
        return sample

    monkeypatch.setattr(loop, "pause", pause_late)
    assert asyncio.run(call_meanwhile()).finish_reason == "abort"
    assert life.state is None


@pytest.mark.hostile
@pytest.mark.timeout(60)
def test_a_call_before_the_first_version_ends_although_it_comes_while_an_engine_is_told_to_wake(monkeypatch):
    life = EngineLife(EchoEngine, lambda: WeightSource(WeightDirectory.local(), Shelf()))
    runs = threading.Event()

    async def call_meanwhile():
        wake = asyncio.create_task(asyncio.to_thread(life.wake))
        while not life._changes.locked():
            await asyncio.sleep(0.001)
        loop, requests = await admitted(life, Asked({"prompt_ids": [[5]]}, Sampling(), None, None))
        call = asyncio.ensure_future(anext(samples_of(loop, requests)))
        while not loop.load().result(30).running:
            await asyncio.sleep(0.001)
        runs.set()
        await wake
        async with asyncio.timeout(30):
            with pytest.raises(StaleWeightsError, match="no version"):
                await call

    monkeypatch.setattr(life, "_check_ended", lambda: runs.wait(30))
    try:
        asyncio.run(call_meanwhile())
    finally:
        monkeypatch.undo()
        life.sleep("abort")


@pytest.mark.hostile
@pytest.mark.timeout(60)
@pytest.mark.parametrize("mode", ["continue", "finish", "abort"])
def test_a_call_that_comes_just_before_the_first_update_pauses_has_its_weights(monkeypatch, mode):
    directory, shelf = WeightDirectory.local(), Shelf()
    life = EngineLife(EchoEngine, lambda: WeightSource(directory, shelf))
    loop = life.awake.loop
    pause, came = loop.pause, threading.Event()

    def pause_late(*args):
        assert came.wait(30)
        return pause(*args)

    async def call_meanwhile():
        update = asyncio.create_task(
            asyncio.to_thread(life.update, lambda one: one.pull(missing_ok=False), mode)
        )
        while not life._changes.locked():
            await asyncio.sleep(0.001)
        loop, requests = await admitted(
            life, Asked({"prompt_ids": [[5]]}, Sampling(max_tokens=2), None, None)
        )
        samples = samples_of(loop, requests)
        first = asyncio.create_task(anext(samples))
        while not loop.load().result(30).running:
            await asyncio.sleep(0.001)
        came.set()
        _, sample = await first
        await update
        return sample

    monkeypatch.setattr(loop, "pause", pause_late)
    try:
        EchoTrainer(directory, shelf).publish_weights()
        sample = asyncio.run(call_meanwhile())
        assert (sample.finish_reason, {*sample.versions}) == ("length", {1})
    finally:
        life.sleep("abort")


@pytest.mark.hostile
def test_samples_that_are_to_end_before_an_update_do_so_although_a_pause_waits_for_them_too(stage):
    stage.call("set_on_update", "finish")
    future = stage.begin(batch_of(), LONG)
    stage.wait_for(lambda found: found.running)
    with ThreadPoolExecutor() as pool:
        paused = pool.submit(stage.call, "pause", "finish")
        stage.wait_for(lambda found: found.state != "awake")
        stage.sync()
        paused.result(60)
    assert {version for row in rows_of(future.result(60)) for version in row[4]} == {1}
    assert stage.metrics().weight_version == 2


@pytest.mark.hostile
def test_a_pause_that_nobody_waits_for_any_more_comes_all_the_same(stage):
    future = under_way(stage)
    given_up, other = (
        asyncio.run_coroutine_threadsafe(stage.worker.pause("finish"), stage.loop) for _ in range(2)
    )
    stage.wait_for(lambda found: found.state == "paused")
    assert given_up.cancel()
    assert {row[5] for row in rows_of(future.result(60))} == {"length"}
    other.result(60)
    late = stage.begin(batch_of(), {"max_tokens": 2})
    stage.wait_for(lambda found: found.waiting)
    stage.call("resume")
    assert {row[5] for row in rows_of(late.result(60))} == {"length"}


def pausing(stage, method, *args):
    """A call that waits for samples on their way to end; gives its future once it does."""
    reason = {"sleep": "sleep", "pause": "caller", "update": "update"}[method]
    future = ThreadPoolExecutor(1).submit(stage.sync if method == "update" else stage.call, *args)
    loop = stage.worker._life.awake.loop
    while not loop.is_held(reason) and not future.done():
        time.sleep(0.001)
    assert not loop.is_paused(reason)
    return future


@pytest.mark.hostile
def test_a_sleep_is_told_of_a_pause_that_came_just_before_it(stage):
    future, go = under_way(stage), threading.Event()
    stage.worker._life.awake.loop.call(go.wait)  # a step that takes its time
    with ThreadPoolExecutor() as pool:
        paused = pool.submit(stage.call, "pause")
        loop = stage.worker._life.awake.loop
        while loop._commands.empty():
            time.sleep(0.001)
        sleeps = pool.submit(stage.call, "sleep", "finish")
        while loop._commands.qsize() < 2:
            time.sleep(0.001)
        go.set()
        paused.result(60)
        with pytest.raises(GenerationError, match="wait in a pause, and can't end"):
            sleeps.result(60)
    stage.call("resume")
    assert {row[5] for row in rows_of(future.result(60))} == {"length"}
    stage.call("sleep")


@pytest.mark.hostile
@pytest.mark.parametrize("call", [("sleep", "finish"), ("pause", "finish")])
def test_what_waits_for_samples_to_end_is_told_of_a_pause_that_has_them_wait(stage, call):
    future = under_way(stage)
    waits = pausing(stage, call[0], *call)
    stage.call("pause")
    with pytest.raises(GenerationError, match="another pause"):
        waits.result(60)
    assert stage.metrics().state == "paused"
    stage.call("resume")
    assert {row[5] for row in rows_of(future.result(60))} == {"length"}
    stage.call("sleep")
    assert stage.metrics().state == "asleep"


@pytest.mark.hostile
def test_an_update_that_waits_for_samples_to_end_comes_in_a_pause_that_has_them_wait(stage):
    stage.call("set_on_update", "finish")
    future = under_way(stage)
    update = pausing(stage, "update")
    stage.call("pause")
    assert update.result(60) == 2
    assert stage.metrics().running, "the pause holds through the update"
    stage.call("resume")
    for row in rows_of(future.result(60)):
        assert (set(row[4]), row[5]) == ({1, 2}, "length")


def references_of(tokens, logprob=1.0):
    return [GreedyReference((5,), tuple(range(6, 6 + tokens)), (logprob,) * tokens)]


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("then", "says"), [("sync", "version 2 came while"), ("abort", r"of 80 tokens \(abort")]
)
def test_a_check_of_other_samples_than_those_of_one_version_is_none(stage, then, says):
    with ThreadPoolExecutor() as pool:
        checked = pool.submit(stage.call, "check", references_of(80))
        stage.wait_for(lambda found: found.running)
        stage.sync() if then == "sync" else stage.call("abort")
        with pytest.raises(GenerationError, match=says):
            checked.result(60)


def test_log_probabilities_that_are_no_numbers_do_not_agree(stage):
    assert stage.call("check", references_of(3), tolerance=0.0).difference == 0
    assert stage.call("check", references_of(3, math.nan)).difference == math.inf
    with pytest.raises(WeightCheckError):
        stage.call("check", references_of(3, math.nan), tolerance=1e9)


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
@pytest.mark.parametrize("methods", [("sleep", "wake"), ("wake",)])
def test_an_engine_that_fails_says_so_and_is_made_anew(stage, kind, methods):
    future = under_way(stage)
    engine_of(stage).failure = kind("no memory is left")
    for result in (future.result, lambda _: stage.generate(batch_of())):
        with pytest.raises(EngineFailedError, match="no memory is left"):
            result(60)
    for method in methods:
        stage.call(method)
    assert rows_of(stage.generate(batch_of(), {"max_tokens": 1}))[0][4] == [1]


def test_an_engine_that_does_not_end_is_not_said_to_sleep():
    """Whose turn it is next would have its memory beside what is left of this one."""
    what = "a process of its does not end"
    with pytest.raises(GenerationError, match=what), local_stage(EchoWorker, MODEL, EchoTrainer) as stage:
        engine_of(stage).ends = False
        for method in ("sleep", "sleep", "wake"):
            with pytest.raises(GenerationError, match=what):
                stage.call(method)


def test_an_engine_that_does_not_end_after_a_wake_that_failed_gets_none_beside_it(monkeypatch):
    what = "a process of its does not end"
    with pytest.raises(GenerationError, match=what), local_stage(EchoWorker, MODEL, EchoTrainer) as stage:
        stage.call("sleep")
        with monkeypatch.context() as patched:
            patched.setattr(EchoEngine, "ends", False)
            patched.setattr(EchoEngine, "loads_to_fail", 2)
            with pytest.raises(GenerationError, match=what):
                stage.call("wake")
        with pytest.raises(GenerationError, match=what):
            stage.call("wake")


def test_an_engine_that_does_not_answer_is_ended_all_the_same(stage):
    future = under_way(stage)
    engine_of(stage).aborts = False
    stage.call("sleep", "abort")
    with pytest.raises(EngineFailedError, match="does not answer"):
        future.result(60)
    stage.call("wake")
    assert rows_of(stage.generate(batch_of(), {"max_tokens": 1}))[0][4] == [1]


def test_samples_under_way_end_with_a_sleep(stage):
    future = under_way(stage)
    stage.call("pause")
    late = stage.begin(batch_of(), LONG)
    stage.wait_for(lambda found: found.waiting)
    stage.call("sleep", "abort")
    for each in (future, late):
        assert {row[5] for row in rows_of(each.result(60))} == {"abort"}
    stage.call("wake")
    assert stage.metrics().state == "awake", "the pause has ended with the engine"
