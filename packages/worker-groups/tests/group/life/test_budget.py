import math
from itertools import pairwise

import pytest

from raycrew.worker_groups import WorkerGroupError
from raycrew.worker_groups._group.life.budget import LONGEST_PAUSE_S, QUIET_S, RestartBudget


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_pauses_grow_and_an_old_restart_costs_none():
    clock = Clock()
    budget = RestartBudget(5, clock)
    assert [budget.take(), budget.take()] == [0.0, 1.0]
    clock.now += 1.5  # half a second after the second began
    assert budget.take() == 1.5
    clock.now += 1000
    assert budget.take() == 0.0
    assert (budget.take(), budget.used) == (8.0, 5)
    with pytest.raises(WorkerGroupError, match="all 5 restarts"):
        budget.take()


def test_the_longest_pause():
    budget = RestartBudget(40, Clock())
    pauses = [budget.take() for _ in range(40)]
    assert max(b - a for a, b in pairwise(pauses)) == LONGEST_PAUSE_S


def test_none_at_all():
    budget = RestartBudget(0)
    assert not budget.is_refusing, "nobody has asked"
    with pytest.raises(WorkerGroupError, match="all 0 restarts"):
        budget.take()
    assert budget.is_refusing


def test_pauses_stay_bounded_however_many_restarts_there_were():
    budget = RestartBudget(3000, clock=lambda: 0.0)
    assert all(math.isfinite(budget.take()) for _ in range(2000))


def test_it_begins_anew_after_an_hour_without_a_death():
    clock = Clock()
    budget = RestartBudget(2, clock)
    budget.take()
    clock.now += QUIET_S - 1
    assert (budget.take(), budget.used) == (0.0, 2)
    clock.now += QUIET_S
    assert (budget.take(), budget.take(), budget.used) == (0.0, 1.0, 2)


def test_neither_a_long_restart_nor_refusals_are_an_hour_without_a_death():
    clock = Clock()
    budget = RestartBudget(1, clock)
    budget.take()
    clock.now += 2 * QUIET_S
    budget.ended()
    for _ in range(3):
        clock.now += QUIET_S - 1
        with pytest.raises(WorkerGroupError, match="the one restart of max_restarts is used up"):
            budget.take()
    assert budget.is_refusing
    clock.now += QUIET_S
    assert (budget.take(), budget.is_refusing) == (0.0, False)
