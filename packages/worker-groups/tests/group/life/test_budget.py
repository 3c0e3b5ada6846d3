import math
from itertools import pairwise

import pytest

from raycrew.worker_groups import WorkerGroupError
from raycrew.worker_groups._group.life.budget import LONGEST_PAUSE_S, RestartBudget


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
    with pytest.raises(WorkerGroupError, match="all 0 restarts"):
        RestartBudget(0).take()


def test_pauses_stay_bounded_however_many_restarts_there_were():
    budget = RestartBudget(3000, clock=lambda: 0.0)
    assert all(math.isfinite(budget.take()) for _ in range(2000))
