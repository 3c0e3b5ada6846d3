"""When calls have ended, and what becomes of those that were lost. No Ray here."""

import threading
from contextlib import contextmanager

import pytest
from patience import PATIENCE_S, eventually
from ray.exceptions import ActorDiedError

from raycrew.worker_groups import (
    GroupResizedError,
    MultiWorkerFuture,
    WorkerFailureError,
    WorkerGroupClosedError,
)
from raycrew.worker_groups._calls import Settled, Whereabouts
from raycrew.worker_groups._calls.answers import deaths, endings, gathering, telling
from raycrew.worker_groups._calls.answers.recovery import Recovery
from raycrew.worker_groups.sharding._ranks import WorkerFacts

pytestmark = pytest.mark.hostile


class Connection:
    """References are what they stand for."""

    def get(self, refs, timeout=None):
        for ref in refs if isinstance(refs, list) else [refs]:
            if isinstance(ref, Exception):
                raise ref
        return refs


def settled(refs, *_, **__):
    errors = {i: ref for i, ref in enumerate(refs) if isinstance(ref, Exception)}
    return Settled({i: ref for i, ref in enumerate(refs) if i not in errors}, errors)


@pytest.fixture(autouse=True)
def connected(monkeypatch):
    @contextmanager
    def connection(check):
        yield Connection()

    for module in (gathering, endings):
        monkeypatch.setattr(module, "while_connected", connection)
        monkeypatch.setattr(module, "await_some", lambda refs, *_, **__: refs)
        monkeypatch.setattr(module, "settle", settled)
    monkeypatch.setattr(telling, "check_session", lambda *_: None)
    monkeypatch.setattr(gathering, "is_stored", lambda ref: False)
    monkeypatch.setattr(gathering, "raised_by", lambda ref, _: ref if isinstance(ref, Exception) else None)


def test_a_callback_that_raises_that_a_group_is_closed_is_logged(caplog):
    def fail(_):
        raise WorkerGroupClosedError("the other group was shut down")

    MultiWorkerFuture([], []).add_done_callback(fail)
    eventually(lambda: "the other group was shut down" in caplog.text, "it is logged")


def test_errors_stand_for_results_that_a_group_of_another_size_can_not_give_any_more():
    def send():
        raise GroupResizedError("it has 1 worker by now")

    calls = [1, ActorDiedError()]
    future = MultiWorkerFuture(calls, [0, 1], recovery=Recovery(lambda error: True, send))
    fine, lost = future.get_results(return_exceptions=True)
    assert (fine, type(lost)) == (1, WorkerFailureError)
    with pytest.raises(GroupResizedError):
        MultiWorkerFuture(calls, [0, 1], recovery=Recovery(lambda error: True, send)).get_results()


def test_what_keeps_a_call_from_being_sent_again_is_logged_and_noted(caplog):
    def restart(error):
        raise KeyError("shard")

    died = ActorDiedError()
    future = MultiWorkerFuture([1, died], [0, 1], method="step", recovery=Recovery(restart, lambda: None))
    assert future.wait(PATIENCE_S)
    assert "step, ranks=[0, 1]) was not sent again" in caplog.text
    with pytest.raises(WorkerFailureError) as failed:
        future.get_results()
    assert failed.value.cause is died
    assert failed.value.__notes__ == ["this call was not sent again: KeyError: 'shard'"]


def test_that_a_call_can_not_be_sent_again_in_a_group_of_another_size_is_noted():
    def send():
        raise GroupResizedError("it has 1 worker by now")

    recovery = Recovery(lambda error: True, send)
    future = MultiWorkerFuture([1, ActorDiedError()], [0, 1], method="step", recovery=recovery)
    assert future.wait(PATIENCE_S)
    with pytest.raises(WorkerFailureError) as failed:
        future.get_results()
    assert failed.value.__notes__ == ["this call was not sent again: it has 1 worker by now"]


def test_a_call_that_no_thread_could_be_had_for_is_sent_again_by_a_later_look(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    recovery = Recovery(lambda error: True, lambda: MultiWorkerFuture([1, 2], [0, 1]))
    future = MultiWorkerFuture([1, ActorDiedError()], [0, 1], method="step", recovery=recovery)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="can't start"):
        patched.setattr(threading.Thread, "start", refuse)
        future.done()
    assert future.wait(PATIENCE_S)
    assert future.get_results() == [1, 2]


def test_what_became_of_a_call_is_told_without_a_restart_and_before_one():
    restarted = []

    def restart(error):
        restarted.append(error)
        return True

    died = ActorDiedError()
    recovery = Recovery(restart, lambda: MultiWorkerFuture([1, 2], [0, 1]))
    future = MultiWorkerFuture([1, died], [0, 1], method="step", recovery=recovery)
    failed = future.exception()
    assert isinstance(failed, WorkerFailureError) and failed.cause is died
    assert not restarted
    assert future.get_results() == [1, 2]
    assert len(restarted) == 1
    assert future.exception() is None


def test_watches_are_asked_once_for_all_that_have_died(monkeypatch):
    asked = []
    monkeypatch.setattr(deaths, "last_seen", lambda workers, timeout_s: asked.append(list(workers)) or {})
    places = {rank: Whereabouts("policy", facts=WorkerFacts("a", "10.0.0.1", rank)) for rank in range(4)}
    calls = [ActorDiedError(), 1, ValueError("odd"), ActorDiedError()]
    future = MultiWorkerFuture(calls, range(4), method="step", places=places)
    results = future.get_results(return_exceptions=True)
    assert asked == [[0, 3]]
    assert [getattr(result, "cause", result) for result in results] == calls
    assert [result.pid for result in results if isinstance(result, WorkerFailureError)] == [0, 2, 3]


def test_who_only_waits_behind_a_proxy_loads_no_results(monkeypatch):
    loaded, told = [], []
    monkeypatch.setattr(gathering, "raised_by", lambda ref, _: loaded.append(ref))
    calls = [b"large", ActorDiedError()]

    def future():
        return MultiWorkerFuture(calls, [0, 1], recovery=Recovery(bool, None, lambda: told.append(1)))

    monkeypatch.setattr(endings, "is_behind_proxy", lambda: True)
    behind = future()
    assert (behind.wait(0), behind.done(), loaded, told) == (True, True, [], [])
    monkeypatch.setattr(endings, "is_behind_proxy", lambda: False)
    assert future().done()
    assert loaded == calls
