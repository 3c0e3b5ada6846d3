"""Waiting for several calls: deadlines, grace, what is pending. A made-up session; no Ray here."""

import math
import threading
import time
from contextlib import contextmanager

import pytest

from raycrew.worker_groups._calls.answers import waiting
from raycrew.worker_groups._calls.answers.waiting import (
    Settled,
    await_some,
    by_rank,
    deadline_after,
    left,
    settle,
)


class Calls:
    """A session whose calls are done in rounds: each `wait` ends with the next round, or with nothing."""

    def __init__(self, *rounds, results=None):
        self.rounds, self.results = list(rounds), results or {}
        self.done, self.timeouts, self.fetched = set(), [], []

    def wait(self, refs, num_returns=1, timeout=None, fetch_local=True):
        self.timeouts.append(timeout)
        self.fetched.append(fetch_local)
        if not self.done.intersection(refs) and self.rounds:
            self.done |= set(self.rounds.pop(0))
        ready = [ref for ref in refs if ref in self.done][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref):
        result = self.results.get(ref, ref.upper())
        if isinstance(result, Exception):
            raise result
        return result


@pytest.fixture
def connect(monkeypatch):
    def use(session):
        @contextmanager
        def connected(check):
            yield session

        monkeypatch.setattr(waiting, "while_connected", connected)
        return session

    return use


def nothing():
    pass


def over():
    return time.monotonic() - 1


def test_all_calls_are_settled_by_their_position(connect):
    connect(Calls("b", "ac"))
    done = []
    settled = settle(["a", "b", "c"], None, nothing, on_done=done.append)
    assert settled.values == {0: "A", 1: "B", 2: "C"}
    assert (settled.errors, settled.pending, sorted(settled.elapsed_s)) == ({}, [], [0, 1, 2])
    assert (done[0], sorted(done)) == (1, [0, 1, 2])
    assert all(elapsed >= 0 for elapsed in settled.elapsed_s.values())


def test_rounds_in_which_nothing_is_done_do_not_end_a_wait_that_has_time(connect):
    session = connect(Calls("", "", "a", "", "b"))
    assert settle(["a", "b"], None, nothing).values == {0: "A", 1: "B"}
    assert settle(["a", "b"], time.monotonic() + 600, nothing).values == {0: "A", 1: "B"}
    assert all(timeout is not None and 0 < timeout <= 1.0 for timeout in session.timeouts if timeout != 0)
    connect(waited := Calls("", "a"))
    assert settle(["a"], None, nothing).values == {0: "A"}
    assert min(waited.timeouts) > 0, "it is waited for, and not asked again and again"


def test_a_deadline_that_is_over_ends_the_wait_but_takes_what_is_done(connect):
    connect(Calls("b"))
    settled = settle(["a", "b", "c"], over(), nothing)
    assert (settled.values, settled.pending) == ({1: "B"}, [0, 2])


def test_calls_that_are_done_together_are_taken_together(connect):
    calls = [str(i) for i in range(100)]
    session = connect(Calls(calls))
    assert settle(calls, None, nothing).pending == []
    assert len(session.timeouts) < 5


def test_after_the_first_failure_others_get_the_grace_and_no_more(connect):
    wrong = ValueError("wrong")
    connect(Calls("a", "b", results={"a": wrong}))
    settled = settle(["a", "b", "c"], None, nothing, grace_s=0.0)
    assert settled.errors == {0: wrong}
    assert 2 in settled.pending
    connect(Calls("a", "", "bc", results={"a": wrong}))
    settled = settle(["a", "b", "c"], None, nothing, grace_s=60.0)
    assert (settled.errors, settled.values, settled.pending) == ({0: wrong}, {1: "B", 2: "C"}, [])


def test_an_earlier_deadline_is_kept_when_a_call_fails(connect):
    connect(Calls("a", results={"a": ValueError("wrong")}))
    assert settle(["a", "b"], over(), nothing, grace_s=600.0).pending == [1]


def test_a_failure_may_be_the_connections(connect):
    connect(Calls("a", results={"a": ValueError("wrong")}))
    asked = []

    def go_on():
        asked.append(True)
        if len(asked) == 2:
            raise ConnectionError("ended")

    with pytest.raises(ConnectionError):
        settle(["a"], None, go_on)


def test_some_calls_are_awaited_until_so_many_are_done(connect):
    connect(Calls("", "c", "a"))
    assert await_some(["a", "b", "c"], None, nothing) == ["c"]
    connect(Calls("", "ca"))
    assert await_some(["a", "b", "c"], time.monotonic() + 600, nothing, count=2) == ["a", "c"]
    connect(Calls("", "c"))
    assert await_some(["a", "b", "c"], over(), nothing) == []


def test_results_come_to_this_node_unless_they_are_to_stay_where_they_are(connect):
    for options, fetched in (({}, [True]), ({"fetch_local": False}, [False])):
        session = connect(Calls("a"))
        assert await_some(["a"], None, nothing, **options) == ["a"]
        assert session.fetched == fetched


def test_what_is_left_is_never_negative_and_has_the_lower_bound():
    assert left(None) is None
    assert left(None, 3.0) == 3.0
    assert left(over()) == left(over(), 3.0) == 0.0
    assert left(time.monotonic() + 600, 3.0) == 3.0
    assert 500 < left(time.monotonic() + 600, 1000.0) <= 600


def test_positions_become_ranks():
    wrong = ValueError("wrong")
    told = by_rank(Settled(values={0: 1}, errors={1: wrong}, pending=[2, 3]), [4, 7, 6, 5])
    assert (told.values, told.errors, told.pending) == ({}, {7: wrong}, [5, 6])


def test_a_deadline_is_of_a_number_of_seconds_and_no_further_than_any_wait_can_take():
    assert deadline_after(None) is None
    assert deadline_after(-1) < time.monotonic() < deadline_after(60)
    assert threading.TIMEOUT_MAX > left(deadline_after(math.inf)) > 1e8
    with pytest.raises(TypeError, match="a timeout is a number of seconds, not '5'"):
        deadline_after("5")
    with pytest.raises(ValueError, match="a timeout is a number of seconds, which nan is not"):
        deadline_after(math.nan)
