"""Who stood by and is lost on the way to a rank, without processes."""

from types import SimpleNamespace

import pytest

from raycrew.cluster_core import NodeLostError
from raycrew.worker_groups import WorkerFailureError
from raycrew.worker_groups._health import Seen
from raycrew.worker_groups._start import StandbyLostError
from raycrew.worker_groups._start.newcomers import taking_over
from raycrew.worker_groups._start.newcomers.taking_over import TakeOver
from raycrew.worker_groups.errors import combine

pytestmark = pytest.mark.hostile


class Death(Exception):
    """Stands for what Ray says of a worker that has died."""


@pytest.fixture(autouse=True)
def deaths(monkeypatch):
    monkeypatch.setattr(taking_over, "has_died", lambda part: type(part.cause) is Death)


def taken_over_by(*pids, go_on=print):
    facts = [SimpleNamespace(pid=pid, node_id=f"node {pid}") for pid in pids]
    return TakeOver(go_on, [SimpleNamespace(facts=own) for own in facts])


def failure(pid, cause):
    return WorkerFailureError("it ended", pid=pid, cause=cause)


def raised_within(made, error):
    with pytest.raises(Exception) as raised, made.watched():
        raise error
    return raised.value


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (failure(1, Death()), True),
        (failure(1, ValueError()), False),
        (failure(7, Death()), False),
        (failure(None, Death()), False),
        (combine([failure(7, Death()), failure(2, Death())]), True),
        (combine([failure(7, Death()), failure(2, ValueError())]), False),
        (NodeLostError("gone", ["node 2"]), True),
        (NodeLostError("gone", ["node 7"]), False),
        (RuntimeError("else"), False),
    ],
)
def test_who_stood_by_is_lost_by_its_death_and_not_by_what_its_class_raises(error, is_lost):
    found = raised_within(taken_over_by(1, 2), error)
    assert type(found) is (StandbyLostError if is_lost else type(error))
    assert (found.__cause__ if is_lost else found) is error


def test_who_has_its_rank_is_a_worker_like_any_other():
    made = taken_over_by(1)
    made.is_over()
    assert raised_within(made, error := failure(1, Death())) is error


def test_who_is_stopped_while_it_takes_over_is_lost_and_nobody_else_is(monkeypatch):
    calls, asked = [], []
    seen = {0: Seen(is_alive=True, is_stopped=True, beat_age_s=1.0), 1: Seen(is_alive=True, beat_age_s=99.0)}

    def look(facts, _):
        asked.append(sorted(facts))
        return {position: seen[position] for position in facts}

    monkeypatch.setattr(taking_over, "last_seen", look)
    monkeypatch.setattr(taking_over, "_LOOK_S", 0.0)
    made = taken_over_by(1, 2, go_on=lambda: calls.append("go on"))
    made()
    seen[0] = Seen(is_alive=True, is_stopped=True, beat_age_s=9.0)
    with pytest.raises(StandbyLostError, match="process 1, which stood by, is stopped"):
        made()
    made.is_over()
    made()
    assert (len(calls), asked) == (3, [[0, 1]] * 2)
    taken_over_by()()
    assert len(asked) == 2, "nobody is asked for where nobody stood by"
