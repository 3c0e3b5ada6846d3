"""When the failure of a rank is told of."""

import contextlib
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from raycrew.tensor_transport._ray import answers, waiting
from raycrew.tensor_transport._ray.answers import answered
from raycrew.tensor_transport.errors import TransportClosedError
from raycrew.tensor_transport.testing._fakes import LocalResults


class Supervised:
    """Results of a group that does something about a failure before it raises."""

    def __init__(self, failure, results):
        self.failure, self.results, self.events, self.limits = failure, results, [], []

    def exception(self, *, timeout=None):
        self.limits.append(timeout)
        return self.failure

    def get_results(self, *, timeout=None):
        self.limits.append(timeout)
        self.events.append("replaced")
        if self.results is None:
            raise self.failure
        return self.results


def test_what_is_there_is_given():
    assert answered(LocalResults([1, 2]), 1.0, pytest.fail) == [1, 2]
    assert answered(Supervised(None, [3]), None, pytest.fail) == [3]


@pytest.mark.parametrize("results", [None, ["of a call that was sent again"]])
def test_a_failure_is_told_before_anything_is_done_about_it(results):
    lost = RuntimeError("lost")
    answer = Supervised(lost, results)
    if results is None:
        with pytest.raises(RuntimeError, match="lost"):
            answered(answer, 5.0, answer.events.append)
    else:
        assert answered(answer, 5.0, answer.events.append) == results
    assert answer.events == [lost, "replaced"]


def test_what_is_left_of_a_deadline_is_for_the_results():
    answer = Supervised(None, [])
    answered(answer, 1e6, pytest.fail)
    first, second = answer.limits
    assert first == 1e6
    assert 0.9e6 < second <= 1e6


def test_without_a_deadline_none_is_set():
    answer = Supervised(None, [])
    answered(answer, None, pytest.fail)
    assert answer.limits == [None, None]


def test_no_time_is_left_once_it_has_been_waited_for_longer():
    answer = Supervised(None, [])
    answered(answer, -1.0, pytest.fail)
    assert answer.limits[1] == 0.0


class Reference:
    """Of an answer, as Ray's: it tells when it is there."""

    def __init__(self):
        self.told = Future()

    def future(self):
        return self.told


class Calls(Supervised, list):
    """References of the calls of some ranks."""

    def __init__(self, references, results):
        Supervised.__init__(self, None, results)
        list.__init__(self, references)
        self.are_looked_for = threading.Event()

    def exception(self, *, timeout=None):
        self.are_looked_for.set()
        return super().exception(timeout=timeout)


@pytest.fixture
def calls(monkeypatch):
    """The calls of two ranks, whose answers are waited for beside the main thread."""
    monkeypatch.setattr(answers, "is_beside", lambda: True)
    monkeypatch.setattr(answers, "ray_module", lambda: SimpleNamespace(ObjectRef=Reference))
    monkeypatch.setattr(answers, "current_session", lambda: SimpleNamespace(check=lambda: None))
    monkeypatch.setattr(answers, "_TOLD_S", 60.0)
    monkeypatch.setattr(waiting, "no_shutdown", contextlib.nullcontext)
    return Calls([Reference(), Reference()], [1, 2])


@pytest.fixture
def waiter(calls):
    thread = threading.Thread(target=answered, args=(calls, None, pytest.fail))
    yield thread
    thread.join(60)
    assert not thread.is_alive()


def test_what_ray_tells_of_is_not_looked_for_before(calls, waiter):
    waiter.start()
    first, second = calls
    first.told.set_result(1)
    assert not calls.are_looked_for.wait(0.3)
    second.told.set_result(2)
    assert calls.are_looked_for.wait(30)


def test_a_failure_is_heard_of_while_others_wait(calls, waiter):
    waiter.start()
    calls[1].told.set_exception(RuntimeError("lost"))
    assert calls.are_looked_for.wait(30)


def test_what_takes_long_is_looked_for(calls, waiter, monkeypatch):
    monkeypatch.setattr(answers, "_TOLD_S", 0.01)
    waiter.start()
    assert calls.are_looked_for.wait(30)


def test_the_answer_itself_says_that_the_connection_has_ended(calls, waiter, monkeypatch):
    def ended():
        raise TransportClosedError("it has ended")

    monkeypatch.setattr(answers, "current_session", lambda: SimpleNamespace(check=ended))
    waiter.start()
    assert calls.are_looked_for.wait(30)
