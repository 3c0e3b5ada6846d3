"""Questions to the watches of several nodes, some of which can't be asked; no Ray is needed."""

import contextlib
import os
import threading
import uuid

import pytest
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RaySystemError, RayTaskError

from raycrew.cluster_core import ClusterClosedError
from raycrew.worker_groups import WorkerGroupError
from raycrew.worker_groups._health import ending, questions, watches
from raycrew.worker_groups.sharding._ranks import WorkerFacts

pytestmark = pytest.mark.hostile

NODES = ["a", "b", "c"]
WORKERS = {rank: WorkerFacts(NODES[rank // 2], "10.0.0.1", rank) for rank in range(6)}


class Time:
    def __init__(self):
        self.now = 100.0
        self.answer_s = 0.0

    def monotonic(self):
        return self.now


class Session:
    """Waits for answers: "deaf" never comes."""

    def __init__(self, time):
        self.time = time

    def while_connected(self):
        return contextlib.nullcontext()

    def wait(self, answers, num_returns, timeout):
        ready = [answer for answer in answers if answer != "deaf"]
        self.time.now += self.time.answer_s if ready else timeout
        return ready, [answer for answer in answers if answer == "deaf"]

    def get(self, answer, timeout):
        if answer == "deaf":
            self.time.now += timeout
            raise GetTimeoutError("no answer")
        if isinstance(answer, Exception):
            raise answer
        return answer.told


class Reference:
    """Of what a watch has told."""

    def __init__(self, *told):
        self.told = list(told)


class Method:
    def __init__(self, answer):
        self.answer = answer
        self.asked = []

    def remote(self, workers, timeout_s, *more):
        self.asked.append(timeout_s)
        self.more = more
        return self.answer


class Watch:
    """All workers end well, or every question has one and the same answer."""

    def __init__(self, *answer):
        self.end = Method(*answer or (Reference([], []),))
        self.await_exit = Method(*answer or (Reference(),))


@pytest.fixture
def world(monkeypatch):
    """Nodes with watches that answer, or errors of Ray's on the way to them."""
    time, found = Time(), {node: Watch() for node in NODES}

    def watch(node_id, timeout_s=10.0):
        if isinstance(found[node_id], Exception):
            if isinstance(found[node_id], TimeoutError):
                time.now += timeout_s
            raise found[node_id]
        return found[node_id]

    monkeypatch.setattr(questions, "watch_on", watch)
    monkeypatch.setattr(watches, "_watches", {(None, node): 1 for node in NODES})
    monkeypatch.setattr(watches, "connection", lambda: None)
    monkeypatch.setattr(questions, "time", time)
    monkeypatch.setattr(questions, "current_session", lambda: Session(time))
    monkeypatch.setattr(questions, "is_alive_node", lambda *_: True)
    monkeypatch.setattr(ending, "current_session", lambda: Session(time))
    monkeypatch.setattr(ending, "request_exit", lambda handles: None)
    monkeypatch.setattr(ending, "end_actors", lambda handles: None)
    monkeypatch.setattr(ending, "await_end", lambda handles, timeout_s: [])
    found["time"] = time
    return found


def test_all_deaf_nodes_together_take_one_deadline(world):
    world.update({node: Watch("deaf") for node in NODES})
    answers = questions.ask("end", WORKERS, 5.0)
    assert world["time"].now <= 100 + 5 + questions._ANSWER_S
    assert list(answers) == NODES
    assert all("does not answer" in str(answer) for answer in answers.values())


def test_a_deaf_node_is_not_waited_for_a_second_time(world):
    world["b"] = Watch("deaf")
    ended = ending.end_workers({rank: object() for rank in WORKERS}, WORKERS, grace_s=1.0)
    assert world["time"].now <= 100 + 1 + questions._ANSWER_S + 2 * ending.DEAF_S
    assert (list(ended.left), ended.occupied) == ([2, 3], True)


def test_a_deaf_node_makes_no_answer_of_another_late(world):
    world["a"], world["time"].answer_s = Watch("deaf"), 0.5
    answers = questions.ask_timed("end", WORKERS, 50.0, {rank: 10 * rank for rank in WORKERS}, may_make=True)
    assert list(answers) == NODES
    assert "does not answer" in str(answers["a"])
    for node in ("b", "c"):
        assert answers[node].told == [[], []]
        assert (answers[node].asked, answers[node].came) == (100.0, 101.0)
    assert world["b"].end.more == ([20, 30],)


class UnluckySession(Session):
    """What "b" tells comes when the wait for it is just over."""

    def wait(self, answers, num_returns, timeout):
        ready = [answer for answer in answers if getattr(answer, "told", None) != ["b"]]
        self.time.now += self.time.answer_s if ready else timeout
        return ready, [answer for answer in answers if answer not in ready]


@pytest.mark.parametrize("first", [None, RayActorError()], ids=["at once", "of another watch"])
def test_what_comes_when_the_wait_is_over_has_come_after_it_was_asked_for(world, monkeypatch, first):
    monkeypatch.setattr(questions, "current_session", lambda: UnluckySession(world["time"]))
    world["time"].answer_s, last = 0.5, Watch(Reference("b"))
    world["b"] = last if first is None else Watch(first)
    if first is not None:
        world["b"].end.remote = lambda *_: world.update(b=last) or first
    answers = questions.ask_timed("end", WORKERS, 50.0, dict.fromkeys(WORKERS), may_make=True)
    assert answers["b"].told == ["b"]
    assert answers["a"].asked < answers["a"].came <= 101.0
    assert answers["b"].asked < answers["b"].came == world["time"].now


def test_a_watch_that_has_died_is_replaced_while_another_node_is_waited_for(world):
    world["a"], dead = Watch("deaf"), Watch(RayActorError())
    world["b"] = dead
    dead.end.remote = lambda *_: world.update(b=Watch()) or RayActorError()
    answers = questions.ask("end", WORKERS, 5.0)
    assert answers["b"] == [[], []]
    assert world["b"].end.asked[0] > 0.0, "there was time left"


def test_what_is_asked_of_watches_that_there_are_makes_none(world):
    del watches._watches[None, "b"]
    answers = questions.ask_within("end", WORKERS, 2.0, may_make=False)
    assert (answers["a"], answers["c"]) == ([[], []], [[], []])
    assert "it has no watch" in str(answers["b"])
    assert not answers["b"].node_is_gone


@pytest.mark.parametrize("had_watch", [True, False])
def test_a_node_that_is_gone_is_known_to_be_to_who_makes_no_watch_there(world, monkeypatch, had_watch):
    world["b"] = Watch(RayActorError())
    if not had_watch:
        del watches._watches[None, "b"]
    monkeypatch.setattr(questions, "is_alive_node", lambda node, _timeout_s: node != "b")
    answers = questions.ask_within("end", WORKERS, 2.0, may_make=False)
    assert (answers["a"], answers["c"]) == ([[], []], [[], []])
    assert answers["b"].node_is_gone


def test_nodes_where_no_watch_can_be_made_take_one_deadline_and_nothing_from_others(world):
    world.update(a=GetTimeoutError("stopped"), b=GetTimeoutError("stopped"))
    watches._watches.clear()
    watches._watches[None, "c"] = 1
    answers = questions.ask("end", WORKERS, 5.0)
    assert world["time"].now <= 100 + 5 + questions._ANSWER_S + questions._LOOK_S
    assert world["c"].end.asked == [5.0]
    assert answers["c"] == [[], []]
    assert list(answers) == NODES


@pytest.mark.parametrize(
    "error",
    [
        GetTimeoutError("stopped"),
        RaySystemError("no"),
        WorkerGroupError("not connected"),
        ClusterClosedError("ended"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("where", ["make", "ask", "look"])
def test_a_node_that_can_not_be_asked_is_named_by_its_ranks(world, monkeypatch, error, where):
    def look(node_id, timeout_s=10.0):
        raise error

    if where == "look":
        monkeypatch.setattr(questions, "is_alive_node", look)
        world["b"] = Watch(RayActorError())
    else:
        world["b"] = error if where == "make" else Watch(error)
    ended = ending.end_workers({rank: object() for rank in WORKERS}, WORKERS, grace_s=1.0)
    assert list(ended.left) == [2, 3]
    assert all("its node b" in why for why in ended.left.values())
    assert ended.occupied


def test_a_watch_that_fails_is_kept(world, monkeypatch):
    forgotten = []
    monkeypatch.setattr(questions, "forget_watch", lambda *watch: forgotten.append(watch))
    world["b"] = Watch(RayTaskError("end", "ValueError: odd", ValueError("odd")))
    left, occupied = ending._kill(WORKERS)
    assert list(left) == [2, 3]
    assert "watch that failed" in left[2]
    assert "odd" in left[2]
    assert (occupied, forgotten) == (True, [])


def test_a_watch_that_is_out_of_reach_for_a_moment_is_kept_by_who_makes_none(world, monkeypatch):
    forgotten = []
    monkeypatch.setattr(questions, "forget_watch", lambda *watch: forgotten.append(watch))
    world["b"] = Watch(ActorUnavailableError("out of reach", None))
    world["c"] = gone = Watch(RayActorError())
    answers = questions.ask_within("end", WORKERS, 2.0, may_make=False)
    assert "out of reach" in str(answers["b"])
    assert forgotten == [("c", gone)]


def test_a_node_that_is_gone_has_no_bundles(world, monkeypatch):
    world["b"] = Watch(RayActorError())
    monkeypatch.setattr(questions, "is_alive_node", lambda *_: False)
    ended = ending.end_workers({rank: object() for rank in WORKERS}, WORKERS)
    assert list(ended.left) == [2, 3]
    assert not ended.occupied


def test_all_threads_of_a_process_have_one_name_for_its_watches_and_a_forked_one_another(monkeypatch):
    both, made = threading.Barrier(2), []

    def slow():
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # two that make one at the same time meet here
        made.append(None)
        return uuid.UUID(int=len(made) << 80)

    monkeypatch.setattr(os, "getpid", lambda: -1)
    monkeypatch.setattr(watches.uuid, "uuid4", slow)
    names = []
    threads = [threading.Thread(target=lambda: names.append(watches.watch_owner())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(made), len(set(names))) == (1, 1)
    monkeypatch.setattr(os, "getpid", lambda: -2)
    names.append(watches.watch_owner())
    monkeypatch.setattr(watches, "connection", lambda: "another")
    names.append(watches.watch_owner())
    assert len(set(names)) == 3


def test_nobody_waits_for_workers_whose_node_is_gone(world, monkeypatch):
    """Nor is a watch made there, for which Ray would let us wait."""
    del watches._watches[None, "b"]
    world["b"] = AssertionError("a watch is made")
    monkeypatch.setattr(questions, "is_alive_node", lambda node, _timeout_s: node != "b")
    enough = iter([False] * 3)
    handles = {rank: object() for rank in WORKERS}
    ended = ending.end_workers(handles, WORKERS, grace_s=30.0, is_enough=lambda: next(enough))
    assert len(list(enough)) == 2, "who is left after one look is nobody"
    assert world["time"].now < 100 + 30
    assert (list(ended.left), ended.late, ended.occupied) == ([2, 3], (2, 3), False)
    assert all(why == "its node b is gone" for why in ended.left.values())
