"""What is known of replicas from what their workers answer, or don't; without Ray."""

import threading
from types import SimpleNamespace

import pytest
from patience import PATIENCE_S

from raycrew.worker_groups.errors import (
    ResultTimeoutError,
    WorkerFailureError,
    WorkerGroupClosedError,
    WorkerGroupError,
)
from raycrew.worker_groups.services import Service
from raycrew.worker_groups.services._endpoint import ReplicaState
from raycrew.worker_groups.services._following import Following


class Group:
    """Workers that answer what they are told to, by rank."""

    absent_ranks = ()

    def __init__(self, *answers, has_given_up=False):
        self.answers = answers
        self._supervision = SimpleNamespace(has_given_up=has_given_up)

    def _open(self):
        """It is."""

    def on(self, ranks, timeout):
        answer = self.answers[ranks[0]]

        def results(timeout):
            if isinstance(answer, Exception):
                raise answer
            return [answer]

        return SimpleNamespace(call=lambda method: SimpleNamespace(get_results=results))


READY = ReplicaState(0, "ready", pid=7)
DEAD = WorkerFailureError("killed by signal 9", rank=1, log_tail="the last words")


@pytest.mark.parametrize(("has_given_up", "status"), [(False, "lost"), (True, "failed")])
def test_a_worker_that_died_is_lost_or_has_failed_where_no_restart_is_left(has_given_up, status):
    following = Following(2)
    following.look(Group(READY, DEAD, has_given_up=has_given_up))
    ready, other = following.states
    assert (ready, other.status) == (READY, status)
    assert "killed by signal 9" in other.reason
    assert ("no restarts of its worker are left" in other.reason) is has_given_up
    assert other.log_tail == ("the last words" if has_given_up else "")


def test_who_does_not_answer_in_time_is_as_before_and_who_answers_again_is_what_it_says():
    following = Following(1)
    following.look(Group(READY))
    following.look(Group(ResultTimeoutError("not yet", [0])))
    assert following.states == (READY,)
    following = Following(1)
    following.look(Group(WorkerFailureError("gone", rank=0), has_given_up=True))
    following.look(Group(READY, has_given_up=True))
    assert following.states == (READY,)


class Slow(Group):
    """One whose workers answer when they may; by then they are dead."""

    absent_ranks = ()

    def __init__(self):
        super().__init__(ResultTimeoutError("not yet", [0]))

    def on(self, ranks, timeout):
        def results(timeout):
            if isinstance(self.answers[0], Exception):
                raise self.answers[0]
            return list(self.answers)

        return SimpleNamespace(call=lambda method: SimpleNamespace(get_results=results))


def test_what_a_worker_said_before_its_death_does_not_count_after_it():
    following, group = Following(1), Slow()
    following.look(group)
    following.note_loss(WorkerFailureError("killed by signal 9", rank=0))
    group.answers, group.absent_ranks = (READY,), (0,)
    following.look(group)
    assert [state.status for state in following.states] == ["lost"], "nobody is there to be asked"
    group.absent_ranks = ()
    following.look(group)
    assert following.states == (READY,)


def test_a_death_is_that_of_whoever_was_asked():
    following = Following(1)
    following.look(Group(READY))
    following.look(Group(WorkerFailureError("gone, and nobody knows who")))
    assert [(state.status, state.endpoint) for state in following.states] == [("lost", None)]


def test_a_question_that_can_not_be_answered_is_asked_again():
    following = Following(1)
    with pytest.raises(WorkerGroupError, match="who knows"):
        following.look(Group(WorkerGroupError("who knows")))
    following.look(Group(READY))
    assert following.states == (READY,)


class Forked(Group):
    def _open(self):
        raise WorkerGroupClosedError("it is of the process that this one was forked from")


def test_a_forked_process_does_not_wait_for_the_thread_that_looks():
    following, refused = Following(1), []

    def look():
        with pytest.raises(WorkerGroupClosedError) as error:
            following.look(Forked())
        refused.append(error)

    with following._looking:  # as that thread has it
        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        looking.join(PATIENCE_S)
    assert refused


def service():
    """One whose group is only asked, by whoever may not ask it anything."""
    made = Service.__new__(Service)
    options = SimpleNamespace(grace_s=1.0)
    vars(made).update(_closed=False, _following=Following(1), _options=options, _group=Group(READY))
    return made


@pytest.mark.parametrize("wrong", [float("nan"), "1"])
def test_times_that_are_none_are_refused_before_anything_is_done(wrong):
    made = service()
    with pytest.raises((TypeError, ValueError), match="a timeout is a number of seconds"):
        made.await_ready(wrong)
    with pytest.raises((TypeError, ValueError), match="a timeout is a number of seconds"):
        made.shutdown(wrong)
    assert [state.status for state in made.replicas] == ["restarting"], "it is not closed"
