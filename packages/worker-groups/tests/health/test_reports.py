"""What is told of a worker, from what is seen of it."""

import json
import math
import pickle
import time
from fractions import Fraction

import pytest

from raycrew.worker_groups import ResourceUsage, StuckWorker, WorkerStatus
from raycrew.worker_groups._health.reports import (
    RunningCall,
    Seen,
    check_threshold,
    checked_patience,
    checked_time,
    why_stuck,
)

LONG = RunningCall("train", 7, 100.0, 100.0)


def seen(beat_age_s=0.3, *calls, **more):
    return Seen(is_alive=True, is_told=True, beat_age_s=beat_age_s, calls=calls, **more)


@pytest.mark.parametrize(
    ("what", "threshold_s", "reason"),
    [
        (seen(), 5, None),
        (seen(0.3, LONG), 5, "no_progress"),
        (seen(0.3, LONG), 200, None),
        (seen(0.3, RunningCall("train", 7, 100.0, 0.5)), 5, None),
        (seen(0.3, RunningCall("new", 8, 1.0, 1.0), LONG), 5, "no_progress"),
        (seen(6.0), 5, "gil_held"),
        (seen(6.0), 20, None),
        (seen(1.5), 0.1, None),
        (seen(2.0), 0.1, None),
        (seen(2.5), 0.1, "gil_held"),
        (seen(6.0), 6.0, None),
        (seen(0.3, RunningCall("train", 7, 100.0, 5.0)), 5.0, None),
        (seen(6.0, LONG), 5, "gil_held"),
        (seen(2.5, is_stopped=True), 600, "stopped"),
        (seen(0.5, is_stopped=True), 0.1, None),
        (seen(2.0, is_stopped=True), 0.1, None),
        (Seen(is_alive=True, is_stopped=True), 600, "stopped"),
        (Seen(is_alive=True), 0.1, None),
        (Seen(is_alive=False, calls=(LONG,)), 5, None),
    ],
)
def test_who_is_stuck(what, threshold_s, reason):
    found = why_stuck(what, threshold_s)
    assert (found and found[0]) == reason


@pytest.mark.parametrize(
    ("what", "state"),
    [
        (seen(), "ready"),
        (seen(0.3, LONG), "busy"),
        (seen(2.5, LONG), "silent"),
        (seen(2.0), "ready"),
        (seen(2.5, LONG, is_stopped=True), "stopped"),
        (Seen(is_alive=True), "alive"),
        (Seen(is_alive=False, is_told=True, calls=(LONG,)), "dead"),
    ],
)
def test_states(what, state):
    assert what.state == state


def test_a_stuck_worker_says_what_is_known():
    stuck = StuckWorker(1, "no_progress", "train", 7, 100.0, 60.0, 4711, "abc")
    assert str(stuck) == "rank 1 (pid 4711 on node abc): no tick in 'train' (call 7) for 60.0 s"
    idle = StuckWorker(0, "stopped", None, None, None, None, 4711, "abc")
    assert str(idle) == "rank 0 (pid 4711 on node abc): its process is stopped"


def test_a_status_is_its_word_and_more():
    status = WorkerStatus("busy", seen(0.3, RunningCall("late", 9, 1.0, 1.0), LONG, private_bytes=1000))
    assert status == "busy"
    assert {status} == {"busy"}
    assert json.dumps({0: status}) == '{"0": "busy"}'
    assert (status.method, status.sequence, status.running_s, status.silent_s) == ("train", 7, 100.0, 100.0)
    assert status.beat_age_s == 0.3
    assert status.private_bytes == 1000
    assert status.device_bytes is None
    assert len(status.calls) == 2
    assert repr(status) == (
        "WorkerStatus('busy', beat_age_s=0.3, method='train', private_bytes=1000, running_s=100.0, "
        "sequence=7, silent_s=100.0)"
    )
    assert abs(time.time() - 100.0 - status.running_since) < 60
    again = pickle.loads(pickle.dumps(status))
    assert (again, again.method, again.calls) == ("busy", "train", status.calls)


def test_a_status_of_which_nothing_is_known():
    status = WorkerStatus("dead")
    assert (status.method, status.running_since, status.beat_age_s, status.calls) == (None, None, None, ())
    assert repr(status) == "WorkerStatus('dead')"


@pytest.mark.parametrize(
    ("threshold_s", "error"),
    [("5", TypeError), (None, TypeError), (True, TypeError), (0, ValueError), (float("nan"), ValueError)],
)
def test_thresholds_that_are_none(threshold_s, error):
    with pytest.raises(error, match="threshold_s"):
        check_threshold(threshold_s)


@pytest.mark.parametrize(
    ("what", "idle"),
    [
        (seen(), True),
        (seen(0.3, LONG), False),
        (seen(9.0), False),  # its heart is late, though no call is known of
        (seen(9.0, LONG), False),
        (seen(0.3, is_stopped=True), False),
        (Seen(is_alive=True), True),
    ],
)
def test_who_could_answer_at_once(what, idle):
    assert what.is_idle is idle


def test_what_is_seen_of_a_worker_is_what_it_uses_and_the_dead_use_nothing():
    used = {"cpu": 1.5, "private_bytes": 10, "resident_bytes": 20, "device_bytes": 30, "n_processes": 2}
    used["started_bytes"] = 40
    assert ResourceUsage.of(seen(**used)) == ResourceUsage(**used)
    assert ResourceUsage.of(Seen(is_alive=False, **used)) == ResourceUsage()


def test_a_threshold_is_seconds_as_a_float():
    told = [check_threshold(given) for given in (5, 0.1, Fraction(1, 2), float("inf"))]
    assert told == [5.0, 0.1, 0.5, float("inf")] and {type(one) for one in told} == {float}


def test_patience_is_a_time_or_has_no_end():
    assert [checked_patience(given) for given in (0, 2.5, math.inf)] == [0.0, 2.5, 1e9]
    with pytest.raises(ValueError, match="timeout"):
        checked_patience(math.nan)


def test_a_time_is_a_finite_number_for_which_waits_have_room():
    assert [checked_time("timeout_s", given) for given in (0, 2.5, 1e9)] == [0.0, 2.5, 1e9]
    assert checked_time("timeout_s", 1e300) == 1e9
    assert checked_time("timeout_s", 10**400) == 1e9
    assert type(checked_time("timeout_s", 3)) is float
    for given in (-0.1, math.inf, -math.inf, math.nan):
        with pytest.raises(ValueError, match=r"timeout_s=.*not a finite number"):
            checked_time("timeout_s", given)
    for given in (None, "5", True, [1]):
        with pytest.raises(TypeError, match="timeout_s is a number of seconds, not"):
            checked_time("timeout_s", given)
