"""Which rollouts are tried again, and where."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycrew.worker_groups.balancing import WorkerLoad
from raycrew.worker_groups.rollouts._engine.tasks import Prompt, Retries, Task, Untried
from raycrew.worker_groups.rollouts._values import Outcome


def task_of(n=1, **state):
    return Task(Prompt("p", b"", 0.0, [None] * n, [0] * n), 0, **state)


@pytest.mark.parametrize(
    ("most", "of_errors", "attempts", "kind", "expected"),
    [
        (1, False, 1, "late", True),
        (1, False, 2, "late", False),
        (1, False, 1, "lost", True),
        (0, False, 1, "lost", False),
        (3, False, 1, "raised", False),
        (3, True, 3, "raised", True),
        (3, True, 4, "raised", False),
    ],
)
def test_errors_of_the_user_are_tried_again_only_if_that_is_wanted(most, of_errors, attempts, kind, expected):
    assert Retries(most, of_errors).allow(task_of(attempts=attempts), Outcome(kind=kind)) is expected


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.sets(st.integers(0, 4)))
def test_the_least_busy_worker_that_has_not_failed_it_is_next(outstanding, tried):
    loads = [WorkerLoad(rank, n) for rank, n in enumerate(outstanding)]
    chosen = Untried().choose(loads, task_of(tried=tried))
    others = [load for load in loads if load.rank not in tried] or loads
    assert chosen in {load.rank for load in others}
    assert outstanding[chosen] == min(load.outstanding for load in others)


def test_a_rollout_that_has_a_place_goes_there_however_busy_that_is():
    loads = [WorkerLoad(0, 9), WorkerLoad(1, 0)]
    assert [Untried().choose(loads, task_of(place=place, tried={0})) for place in (0, 1, None)] == [0, 1, 1]


def test_a_prompt_is_complete_when_all_its_rollouts_have_ended_in_order():
    prompt = Prompt("p", b"", 0.0, [None] * 3, [0] * 3)
    tasks = [Task(prompt, i) for i in range(3)]
    tasks[1].attempts = 2
    assert [tasks[i].end(Outcome(text=str(i))) for i in (2, 0, 1)] == [False, False, True]
    assert [outcome.text for outcome in prompt.outcomes] == ["0", "1", "2"] and prompt.attempts == [0, 2, 0]
    assert tasks[1].which == ("p", 1, 2)


def test_a_task_is_all_that_is_gone_by_and_need_not_be_a_key():
    chooser = Untried()
    assert chooser.sticky, "a rollout waits for the worker that was chosen"
    assert not chooser.needs_key and not chooser.needs_usage


def test_a_new_task_may_go_anywhere():
    task = Task(Prompt("p", b"", 0.0, [None], [0]), 0)
    assert (task.tried, task.attempts, task.is_suspect, task.place) == (set(), 0, False, None)
