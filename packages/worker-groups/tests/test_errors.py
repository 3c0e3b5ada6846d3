import pickle

import pytest

from raycrew.worker_groups import (
    ResultTimeoutError,
    WorkerFailureError,
    WorkerFailuresError,
    WorkerStartTimeoutError,
)
from raycrew.worker_groups.errors import combine

DETAILS = {"rank": 3, "pid": 42, "method": "step", "group_name": "policy", "cause": ValueError("no")}


def test_attributes_survive_pickling():
    error = WorkerFailureError(
        "it failed", **DETAILS, traceback="the trace", log_tail="the log", pending=(1,)
    )
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert (one.rank, one.pid, one.method, one.group_name, one.pending) == (3, 42, "step", "policy", (1,))
        assert str(one.cause) == str(one.__cause__) == "no"
        assert str(one).splitlines() == ["it failed", "the trace", "--- last lines of its log ---", "the log"]


def test_several_are_caught_both_ways():
    failures = [WorkerFailureError(f"rank {rank} failed", **{**DETAILS, "rank": rank}) for rank in (1, 2)]
    error = combine(failures)
    assert isinstance(error, WorkerFailuresError)
    with pytest.raises(WorkerFailureError):
        raise error
    caught = []
    try:
        raise error
    except* WorkerFailureError as group:
        caught = list(group.exceptions)
    assert [part.rank for part in caught] == [1, 2]
    again = pickle.loads(pickle.dumps(error))
    assert [part.rank for part in again.exceptions] == [1, 2]
    assert error.rank == 1
    assert "2 workers of 'policy' failed in 'step' (ranks 1, 2)" in str(error)
    assert "[1] rank 2 failed" in str(error)
    assert combine(failures[:1]) is failures[0]


def test_a_part_of_several_keeps_its_kind():
    error = combine([WorkerFailureError("a", **DETAILS), WorkerStartTimeoutError("b", **DETAILS)])
    late, rest = error.split(WorkerStartTimeoutError)
    assert isinstance(late, WorkerFailureError)
    assert [str(part.message) for part in (*late.exceptions, *rest.exceptions)] == ["b", "a"]


def test_timeouts_are_timeouts():
    assert issubclass(WorkerStartTimeoutError, TimeoutError)
    error = pickle.loads(pickle.dumps(ResultTimeoutError("late", [2, 3])))
    assert isinstance(error, TimeoutError)
    assert error.pending == (2, 3)
