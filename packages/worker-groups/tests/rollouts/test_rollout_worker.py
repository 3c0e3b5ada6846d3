"""Rollouts in a worker's event loop, without a group around it."""

import asyncio
import functools
import json
import os
import pickle
import sys
import threading

import pytest
from ray import cloudpickle

from raycrew.worker_groups.rollouts import RolloutSample, current_rollout
from raycrew.worker_groups.rollouts._in_worker import watchdog
from raycrew.worker_groups.rollouts._in_worker.worker import RolloutWorker, check_coroutine
from raycrew.worker_groups.rollouts._values import Call, CurrentRollout, Wishes


def worker_of(rollout, state=None):
    return RolloutWorker(cloudpickle.dumps((rollout, state)))


def call_of(prompt, deadline_s=None, *, grace_s=0.05, is_fresh=False, attempt=0):
    which = CurrentRollout("7", 1, attempt)
    return Call(which, pickle.dumps(prompt), deadline_s, grace_s, is_fresh)


def outcome_of(rollout, prompt=0, *, state=None, wishes=Wishes(), **how):  # noqa: B008 - a frozen value
    return asyncio.run(worker_of(rollout, state).run(call_of(prompt, **how), wishes))


async def doubled(prompt):
    await asyncio.sleep(0)
    return prompt * 2


def test_a_rollout_gives_its_value_and_knows_which_it_is():
    async def tell(prompt):
        return prompt, current_rollout()

    outcome = outcome_of(tell, "a", attempt=2)
    assert outcome.kind is None and pickle.loads(outcome.data) == ("a", ("7", 1, 2))
    with pytest.raises(RuntimeError, match="not called by a rollout"):
        current_rollout()


def test_a_rollout_is_also_an_import_path_a_partial_and_an_object_that_is_called():
    class Agent:
        async def __call__(self, prompt):
            return prompt * 3

        async def rollout(self, prompt):
            return prompt * 4

    async def add(more, prompt):
        return more + prompt

    rollouts = [doubled, f"{__name__}:doubled", f"{__name__}.doubled", Agent(), functools.partial(add, 5)]
    assert [pickle.loads(outcome_of(rollout, 3).data) for rollout in rollouts] == [6, 6, 6, 9, 8]
    assert pickle.loads(outcome_of(Agent.rollout, 3, state=Agent).data) == 12
    for wrong in (Agent, int, len, 7, lambda prompt: prompt):
        with pytest.raises(TypeError, match="coroutine function"):
            check_coroutine(wrong)


def test_a_worker_has_one_state_but_for_whoever_needs_a_fresh_one():
    class Tools:
        made = 0

        def __init__(self):
            type(self).made += 1
            self.used = 0

        async def rollout(self, prompt):
            self.used += 1
            return type(self).made, self.used

    async def main():
        worker = worker_of(Tools.rollout, Tools)
        calls = [call_of(0, is_fresh=is_fresh) for is_fresh in (False, False, True, False)]
        outcomes = [await worker.run(call, Wishes()) for call in calls]
        return [pickle.loads(outcome.data) for outcome in outcomes]

    assert asyncio.run(main()) == [(1, 1), (1, 2), (2, 1), (2, 3)]


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()]
)
def test_whatever_a_rollout_raises_is_told_and_ends_nobody_else(error):
    async def raising(prompt):
        raise error

    async def main():
        worker = worker_of(raising)
        return await asyncio.gather(*[worker.run(call_of(i), Wishes()) for i in range(2)])

    for outcome in asyncio.run(main()):
        assert outcome.kind == "raised" and "Traceback" in outcome.message
        assert type(error).__name__ in outcome.message


def test_a_rollout_is_cancelled_at_its_deadline_and_may_clean_up():
    cleaned = []

    async def slow(prompt):
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(prompt)
            if prompt == "raises":
                raise ValueError

    async def main():
        worker = worker_of(slow)
        worker._rollout = slow  # not a copy
        return [await worker.run(call_of(prompt, 0.01), Wishes()) for prompt in ("ends", "raises")]

    outcomes = asyncio.run(main())
    assert [outcome.kind for outcome in outcomes] == ["late", "late"] and cleaned == ["ends", "raises"]


def test_one_that_ignores_being_cancelled_is_told_of_as_stuck():
    async def stubborn(prompt):
        for _ in range(100):
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                if prompt == "returns":
                    break

    assert outcome_of(stubborn, deadline_s=0.02, grace_s=0.05).kind == "stuck"
    assert outcome_of(stubborn, "returns", deadline_s=0.02).kind == "late"


def test_a_call_that_is_cancelled_cancels_its_rollout():
    ended = asyncio.Event()

    async def slow(prompt):
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def main():
        worker = worker_of(doubled)
        worker._rollout = slow
        running = asyncio.create_task(worker.run(call_of(0), Wishes()))
        await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait_for(ended.wait(), 60)
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())


def test_what_can_not_be_sent_or_kept_is_the_rollouts_error():
    async def give(prompt):
        return prompt() if callable(prompt) else prompt

    def unpicklable():
        return (i for i in range(3))

    outcome = outcome_of(give, sys.intern)
    assert outcome.kind == "raised"

    async def generator(prompt):
        return unpicklable()

    assert "can't be pickled" in outcome_of(generator).message
    for value in ({1, 2}, float("nan")):
        assert "JSON can't hold" in outcome_of(give, value, wishes=Wishes(is_json=True)).message
    for column in ("version", "length"):  # which a line says of the sample itself
        told = outcome_of(give, RolloutSample({column: 1}, 0), wishes=Wishes(is_json=True)).message
        assert "needs another name" in told
    for value, message in (
        ({"tokens": []}, "returns a RolloutSample, not dict"),
        (RolloutSample({"x": 1}, 0), "no column 'x', but tokens"),
        (RolloutSample({}, 0), "has no column at all"),
        (RolloutSample({"tokens": []}, -1), "not negative"),
        (RolloutSample({"tokens": []}, "one"), "a whole number"),
        (RolloutSample({"tokens": []}, 1, "many"), "a whole number"),
    ):
        outcome = outcome_of(give, value, wishes=Wishes(columns=("tokens",)))
        assert outcome.kind == "raised" and message in outcome.message


def test_a_sample_for_a_queue_is_also_json():
    async def give(prompt):
        return RolloutSample({"tokens": [1, 2]}, version=3, length=2)

    outcome = outcome_of(give, wishes=Wishes(is_json=True, columns=("tokens", "reward")))
    assert json.loads(outcome.text) == {"tokens": [1, 2], "version": 3, "length": 2}


def test_a_child_that_a_rollout_forks_does_not_answer_for_it():
    async def forking(prompt):
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return "the child"

    assert pickle.loads(outcome_of(forking).data) == 1


@pytest.mark.parametrize("is_beside", [False, True])
def test_a_worker_tells_from_elsewhere_who_blocks_its_loop(is_beside):
    """Also where that is a task which the rollout has begun, as `gather` does."""
    begun, go_on = threading.Event(), threading.Event()

    async def use_tool(prompt):
        if prompt == "blocks":
            begun.set()
            go_on.wait(60)

    async def blocking(prompt):
        if is_beside:
            await asyncio.gather(asyncio.sleep(0), asyncio.gather(use_tool(prompt)))
        else:
            await use_tool(prompt)

    async def main(worker):
        calls = [call_of(prompt, attempt=i) for i, prompt in enumerate(["waits", "blocks"])]
        await asyncio.gather(*[worker.run(call, Wishes()) for call in calls])

    worker = worker_of(doubled)
    worker._rollout = blocking
    assert asyncio.run(worker.blocking()) is None
    thread = threading.Thread(target=asyncio.run, args=(main(worker),))
    thread.start()
    assert begun.wait(60) and asyncio.run(worker.blocking()) == ("7", 1, 1)
    go_on.set()
    thread.join()
    assert asyncio.run(worker.blocking()) is None and not worker._running


def test_a_process_whose_loop_is_blocked_is_ended_from_inside_where_nobody_else_does(monkeypatch):
    monkeypatch.setattr(watchdog, "_LOOK_S", 0.01)
    ended = threading.Event()

    async def blocking(prompt):
        assert ended.wait(60)

    worker = worker_of(doubled)
    worker._rollout, worker._watchdog = blocking, watchdog.Watchdog(worker._has_no_loop, ended.set)
    assert asyncio.run(worker.run(call_of(0)._replace(end_s=0.05), Wishes())).kind is None
    assert not worker._watchdog._latest
    worker, untimely = watched(monkeypatch, doubled)
    assert asyncio.run(worker.run(call_of(0)._replace(end_s=60.0), Wishes())).kind is None
    assert not worker._watchdog._latest and not untimely.is_set(), "what is over in time is not minded"


def watched(monkeypatch, rollout):
    """A worker whose process would be ended, and what is set then."""
    monkeypatch.setattr(watchdog, "_LOOK_S", 0.02)
    worker, ended = worker_of(doubled), threading.Event()
    worker._rollout, worker._watchdog = rollout, watchdog.Watchdog(worker._has_no_loop, ended.set)
    return worker, ended


def test_a_process_whose_loop_was_ended_ends_also_without_a_deadline(monkeypatch):
    """By a task of the rollout's own: nothing would ever answer for those beside it."""

    async def leaves(prompt):
        async def leave():
            sys.exit(3)

        await asyncio.create_task(leave())

    worker, ended = watched(monkeypatch, leaves)
    loop = asyncio.new_event_loop()
    running = loop.create_task(worker.run(call_of(0), Wishes()))
    with pytest.raises(SystemExit):
        loop.run_until_complete(running)
    assert ended.wait(60)
    assert loop.run_until_complete(running).kind == "raised"  # as nobody goes on on Ray
    loop.close()


def test_one_that_goes_on_after_its_call_was_cancelled_does_not_go_on_for_ever(monkeypatch):
    heard = []

    async def stubborn(prompt):
        while not ended.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                heard.append(prompt)
                if prompt == "ends":
                    return

    async def main(prompt, grace_s):
        running = asyncio.create_task(worker.run(call_of(prompt, grace_s=grace_s), Wishes()))
        await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.wait([running, *worker._running], timeout=60)
        return ended.is_set(), worker._watchdog._latest

    worker, ended = watched(monkeypatch, stubborn)
    assert asyncio.run(main("ends", 60.0)) == (False, {}), "who ends in time is not minded"
    assert asyncio.run(main("goes on", 0.05)) == (True, {})
    assert heard[:2] == ["ends", "goes on"]
