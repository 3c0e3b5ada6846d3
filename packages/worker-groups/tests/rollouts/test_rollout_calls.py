"""What becomes of rollouts whose process was ended, or died, without Ray."""

import threading
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError

from raycrew.worker_groups.balancing import Item, LostWorkerError, Sent, WorkerLoad
from raycrew.worker_groups.errors import WorkerFailureError
from raycrew.worker_groups.rollouts._engine import calls as calling
from raycrew.worker_groups.rollouts._engine.calls import Ended, Limits, RolloutCalls
from raycrew.worker_groups.rollouts._engine.company import Company
from raycrew.worker_groups.rollouts._engine.tasks import Prompt, Retries, Task
from raycrew.worker_groups.rollouts._telling import Tally
from raycrew.worker_groups.rollouts._values import Outcome, Wishes


class Answer:
    """A call that has ended."""

    def __init__(self, outcome=None):
        self.outcome = outcome

    def get_results(self):
        if self.outcome is None:
            raise WorkerFailureError("it has died", rank=0, cause=ActorDiedError())
        return [self.outcome]


class Group:
    """One worker, which answers as it was told."""

    ranks = (SimpleNamespace(rank=0, generation=1),)

    def __init__(self, ended, monkeypatch):
        self.answer, self.generation, self.asked = Answer(), 1, []
        loads = lambda: [WorkerLoad(0, 0)]  # noqa: E731
        ignored = lambda _: None  # noqa: E731
        self.balancer = SimpleNamespace(send=self.send, returned=ignored, lose=ignored, loads=loads)
        monkeypatch.setattr(calling, "end_workers", lambda handles, _: ended.extend(handles))

    def send(self, rank, method, args, kwargs, timeout):
        self.asked.append(args[0])
        return Sent(rank, self.generation, self.answer, None)

    def _workers(self):
        return SimpleNamespace(handles={0: "worker"}, facts={0: None})


def sent_by(calls, name="0"):
    task = Task(Prompt(name, b"", 0.0, [None], [0]), 0)
    return task, calls.send(0, Item(0, task, None))


def test_a_process_that_was_ended_because_of_one_takes_no_attempt_of_others_whosever_they_are(monkeypatch):
    ended, known, company = [], Ended(), Company()
    group = Group(ended, monkeypatch)
    one, other = (
        RolloutCalls(
            group,
            Limits(1.0, 0.1),
            Wishes(),
            Retries(0, False),
            threading.Event(),
            Tally("p"),
            known,
            company,
        )
        for _ in range(2)
    )
    beside, beside_sent = sent_by(one, "1")
    elsewhere, elsewhere_sent = sent_by(other)  # a prompt of another collection, with the same id
    group.answer = Answer(Outcome(kind="stuck", message="it goes on"))
    guilty, guilty_sent = sent_by(one)
    assert one.collect(guilty_sent)[1].kind == "late" and guilty.attempts == 1 and ended == [0]
    for calls, task, sent in ((one, beside, beside_sent), (other, elsewhere, elsewhere_sent)):
        with pytest.raises(LostWorkerError):
            calls.collect(sent)
        assert task.attempts == 0


def test_a_worker_that_has_failed_a_rollout_makes_a_state_for_it_alone(monkeypatch):
    group = Group([], monkeypatch)
    shared = Limits(1.0, 0.1), Wishes(), Retries(1, False), threading.Event(), Tally("p"), {}, Company()
    calls = RolloutCalls(group, *shared)
    group.answer = Answer(Outcome(kind="late", message="it was late"))
    task, sent = sent_by(calls)
    with pytest.raises(LostWorkerError):
        calls.collect(sent)
    calls.send(0, Item(0, task, None))
    assert [call.is_fresh for call in group.asked] == [False, True]


def test_a_process_that_dies_by_itself_takes_an_attempt_of_who_was_alone_in_it(monkeypatch):
    group = Group([], monkeypatch)
    shared = Limits(1.0, 0.1), Wishes(), Retries(1, False), threading.Event(), Tally("p"), {}, Company()
    calls, others = (RolloutCalls(group, *shared) for _ in range(2))
    (task, sent), (beside, beside_sent) = sent_by(calls), sent_by(others)
    assert calls.collect(sent) == (task, None) and others.collect(beside_sent) == (beside, None)
    assert (task.attempts, beside.attempts) == (0, 0)
    assert calls.next_alone() is task and calls.next_alone() is None
    assert others.next_alone() is None, "it is kept for the other one"
    assert others.loads() == []
    for attempt in (1, 2):
        group.generation += 1
        sent = calls.send(0, Item(0, task, None))
        told, outcome = calls.collect(sent)
        assert (told, task.attempts) == (task, attempt)
        assert (outcome is None) is (attempt == 1)
        calls.next_alone()
    assert outcome.kind == "lost" and "has died" in outcome.message
    assert len(others.loads()) == 1 and others.next_alone() is beside
