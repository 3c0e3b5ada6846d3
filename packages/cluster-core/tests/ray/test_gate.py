"""The gate to Ray's control service, with questions that need no Ray."""

import threading

import pytest
import ray
from ray.exceptions import GetTimeoutError

from raycrew.cluster_core import ClusterError
from raycrew.cluster_core._ray import gate


@pytest.fixture
def ask(monkeypatch):
    """Ask without a connection, in a gate with room for two questions."""
    monkeypatch.setattr(gate._room, "here", threading.BoundedSemaphore(2))
    return lambda question, **how: gate.ask(question, connected=False, **{"timeout_s": 60, **how})


def test_answers_and_errors_are_the_question_s_own(ask):
    assert ask(lambda: 7) == 7
    with pytest.raises(TimeoutError, match="mine"):
        ask(_raise_mine)
    assert ask(lambda: ask(lambda: ask(lambda: threading.current_thread().name))) == "raycrew-answer"
    assert ask(lambda: threading.current_thread().daemon), "a question that hangs would keep a process alive"


def _raise_mine():
    raise TimeoutError("mine")


@pytest.mark.hostile
def test_what_is_answered_too_late_is_undone(ask):
    goes_on, undone, over = threading.Event(), [], threading.Event()

    def make():
        goes_on.wait(60)
        return "a group"

    def undo(made):
        undone.append((made, ask(lambda: "still inside")))
        over.set()

    with pytest.raises(GetTimeoutError, match=r"did not answer within 0\.01 s"):
        ask(make, timeout_s=0.01, undo=undo)
    assert not undone
    goes_on.set()
    assert over.wait(60) and undone == [("a group", "still inside")]


@pytest.mark.hostile
def test_who_is_interrupted_while_a_question_begins_leaves_nothing(ask, monkeypatch):
    begin, undone = threading.Thread.start, []

    def begin_and_be_interrupted(thread):
        begin(thread)
        thread.join(60)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Thread, "start", begin_and_be_interrupted)
        ask(lambda: "made", undo=undone.append)
    assert undone == ["made"]
    assert [gate._room.here.acquire(blocking=False) for _ in range(3)] == [True, True, False]


@pytest.mark.hostile
def test_an_undo_that_fails_is_told(ask, caplog):
    goes_on, over = threading.Event(), threading.Event()

    def undo(_):
        over.set()
        raise RuntimeError("no way back")

    with pytest.raises(GetTimeoutError):
        ask(lambda: goes_on.wait(60), timeout_s=0.01, undo=undo)
    thread = next(one for one in threading.enumerate() if one.name == "raycrew-answer")
    goes_on.set()
    thread.join(60)
    assert over.is_set() and "no way back" in caplog.text


@pytest.mark.hostile
def test_what_is_answered_while_the_asker_is_interrupted_is_undone(ask, monkeypatch):
    undone = []

    class Interrupted(gate.Future):
        def result(self, timeout=None):
            value = super().result(timeout)
            if threading.current_thread() is threading.main_thread() and not undone:
                undone.append("interrupted")
                raise KeyboardInterrupt
            return value

    monkeypatch.setattr(gate, "Future", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask(lambda: "a group", undo=undone.append)
    assert undone == ["interrupted", "a group"]


@pytest.mark.hostile
def test_questions_that_hang_are_bounded_in_number(ask):
    goes_on = threading.Event()
    for _ in range(2):
        with pytest.raises(GetTimeoutError):
            ask(lambda: goes_on.wait(60), timeout_s=0.01)
    with pytest.raises(GetTimeoutError, match="this one was not asked"):
        ask(lambda: 1, timeout_s=0.01)
    goes_on.set()
    assert ask(lambda: 1) == 1


@pytest.mark.hostile
def test_no_question_connects():
    ray.shutdown()
    with pytest.raises(ClusterError, match=r"call init_ray\(\) first"):
        gate.ask(ray.nodes)
    assert not ray.is_initialized()


@pytest.mark.hostile
def test_who_is_interrupted_before_a_question_begins_takes_no_place(ask, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    for what in (gate, "Future"), (threading, "Thread"):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(*what, interrupted)
            ask(lambda: 7)
    assert [gate._room.here.acquire(blocking=False) for _ in range(3)] == [True, True, False]
