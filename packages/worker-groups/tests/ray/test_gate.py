"""Questions to Ray's control service, answered, late, or never."""

import logging
import os
import signal
import threading
from contextlib import contextmanager

import pytest
import ray
from patience import eventually, is_running, within
from ray.exceptions import GetTimeoutError
from workers import Worker

from raycrew.cluster_core import RayVirtualCluster, Session
from raycrew.cluster_core.testing import connected, simulated_nodes
from raycrew.worker_groups import (
    RayWorkerGroup,
    WorkerFailureError,
    WorkerGroupClosedError,
    WorkerGroupError,
    fan_out,
)
from raycrew.worker_groups._ray import gate as gate
from raycrew.worker_groups._ray.gate import ask
from raycrew.worker_groups._ray.nodes import run_on_node

pytestmark = pytest.mark.hostile


class Sessions:
    """Says what session this process has."""

    def __init__(self, session):
        self.session = session

    def current(self):
        return self.session


@pytest.fixture
def sessions(monkeypatch):
    made = Sessions(Session("one"))
    monkeypatch.setattr(Session, "current", made.current)
    return made


def test_answers_and_errors_come_back(sessions):
    assert ask(lambda: 7) == 7
    with pytest.raises(KeyError, match="lost"):
        ask(lambda: {}["lost"])
    with pytest.raises(TimeoutError, match="its own"):
        ask(own_timeout)


def own_timeout():
    raise TimeoutError("its own")


def test_without_a_connection_nothing_is_asked(sessions):
    sessions.session = None
    asked = []
    with pytest.raises(WorkerGroupError, match="not connected to Ray"):
        ask(lambda: asked.append(1))
    assert not asked


@pytest.mark.parametrize("after", [None, Session("two")])
def test_what_fails_since_the_connection_ends_says_so(sessions, after):
    def question():
        sessions.session = after
        raise AttributeError("there is no gcs_client")

    with pytest.raises(WorkerGroupClosedError, match="one, has ended"):
        ask(question)


@pytest.mark.parametrize("reconnected", [False, True])
def test_what_comes_too_late_is_undone_in_its_own_session(sessions, reconnected):
    answers, undone = threading.Event(), []

    def question():
        answers.wait(60)
        return "made"

    with pytest.raises(GetTimeoutError, match="did not answer within"):
        ask(question, timeout_s=0.01, undo=undone.append)
    if reconnected:
        sessions.session = Session("two")
    threads = [t for t in threading.enumerate() if t.name == "raycrew-answer"]
    answers.set()
    for thread in threads:
        thread.join(60)
    assert undone == ([] if reconnected else ["made"])


class LateTask:
    """A function that Ray starts only when it may."""

    def __init__(self, may_start):
        self.may_start = may_start

    def remote(self, *arguments):
        self.may_start.wait(60)
        return "its reference"


def test_a_task_that_is_started_too_late_is_cancelled(sessions, monkeypatch):
    may_start, cancelled = threading.Event(), []
    monkeypatch.setattr(ray, "remote", lambda **options: lambda function: LateTask(may_start))
    monkeypatch.setattr(ray, "cancel", lambda started, force: cancelled.append((started, force)))
    monkeypatch.setitem(ask.__kwdefaults__, "timeout_s", 0.01)
    with pytest.raises(GetTimeoutError, match="did not answer within"):
        run_on_node(max, [1, 2], node_id=None)
    threads = [t for t in threading.enumerate() if t.name == "raycrew-answer"]
    may_start.set()
    for thread in threads:
        thread.join(60)
    assert cancelled == [("its reference", True)]


def test_an_undo_that_fails_is_told(sessions, caplog):
    answers = threading.Event()
    with pytest.raises(GetTimeoutError):
        ask(lambda: answers.wait(60), timeout_s=0.01, undo=lambda _: 1 / 0)
    answers.set()
    eventually(lambda: "could not be taken back" in caplog.text, "the failure is logged")


def test_threads_are_bounded_and_daemons(sessions, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, gate.__name__)
    monkeypatch.setattr(gate._room, "here", threading.BoundedSemaphore(2))
    answers = threading.Event()
    for _ in range(2):
        with pytest.raises(GetTimeoutError, match="did not answer"):
            ask(lambda: answers.wait(60), timeout_s=0.01)
    assert all(t.daemon for t in threading.enumerate() if t.name == "raycrew-answer")
    with pytest.raises(GetTimeoutError, match="was not asked"):
        ask(lambda: 7, timeout_s=0.01)
    answers.set()
    assert ask(lambda: 7, timeout_s=60) == 7


def test_who_is_interrupted_while_a_question_begins_leaves_nothing(sessions, monkeypatch):
    monkeypatch.setattr(gate._room, "here", room := threading.BoundedSemaphore(1))
    begin, undone = threading.Thread.start, []

    def begin_and_be_interrupted(thread):
        begin(thread)
        thread.join(60)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Thread, "start", begin_and_be_interrupted)
        ask(lambda: "made", undo=undone.append)
    assert undone == ["made"]
    assert [room.acquire(blocking=False) for _ in range(2)] == [True, False]


def test_a_question_that_can_not_begin_leaves_its_room(sessions, monkeypatch):
    monkeypatch.setattr(gate._room, "here", threading.BoundedSemaphore(1))
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(threading.Thread, "start", lambda _: 1 / 0)
        ask(lambda: 7)
    assert ask(lambda: 7, timeout_s=60) == 7


def workers():
    return [name for name in ray.util.list_named_actors() if name.startswith("Worker-")]


@contextmanager
def stopped_service(nodes):
    """Ray's control service does nothing meanwhile."""
    service = nodes.head_node.all_processes["gcs_server"][0].process.pid
    os.kill(service, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(service, signal.SIGCONT)


@pytest.mark.long  # in short: above, questions that nobody answers
@pytest.mark.slow
def test_a_stopped_control_service_holds_up_neither_groups_nor_fan_out(monkeypatch, pool, tmp_path):
    monkeypatch.setattr("raycrew.worker_groups._start.startup._CREATE_TIMEOUT_S", 1.0)
    monkeypatch.setitem(ask.__kwdefaults__, "timeout_s", 1.0)
    ray.shutdown()
    with (
        simulated_nodes([{"num_cpus": 4}]) as nodes,
        connected(nodes.address),
        RayVirtualCluster([2], use_gpus=False) as bundles,
        RayWorkerGroup(bundles, Worker, bundle_indices_list=[[0]]) as group,
        RayWorkerGroup(bundles, Worker, bundle_indices_list=[[1]]) as other,
    ):
        assert fan_out(abs, [-1]) == [1]
        pids = group.call("pid").get_results() + other.call("pid").get_results()
        with stopped_service(nodes), within(90):
            assert group.get_worker_status() == {0: "ready"}
            assert group.restart_failed_workers() == []
            os.kill(pids[0], signal.SIGKILL)
            eventually(lambda: group.get_worker_status() == {0: "dead"}, "the dead worker is told")
            with pytest.raises(WorkerFailureError, match="did not answer within"):
                group.restart_failed_workers()
            with pytest.raises((TimeoutError, WorkerGroupError)):
                fan_out(abs, [-1])
            assert other.call("add", 1).get_results(timeout=60) == [1]
            other.shutdown(timeout=2)
            assert (other.unended, is_running(pids[1])) == ({}, False)
        assert group.restart_failed_workers() == [0]
        assert group.call("add", 1).get_results(timeout=60) == [1]
        assert fan_out(abs, [-2]) == [2]


@pytest.mark.long
@pytest.mark.slow
def test_a_stopped_control_service_holds_up_no_start_and_leaves_no_actor(monkeypatch):
    monkeypatch.setattr("raycrew.worker_groups._start.startup._CREATE_TIMEOUT_S", 2.0)
    ray.shutdown()
    with (
        simulated_nodes([{"num_cpus": 4}]) as cluster,
        connected(cluster.address),
        RayVirtualCluster([2], use_gpus=False) as bundles,
        RayWorkerGroup(bundles, Worker, bundle_indices_list=[[0]]) as living,
    ):
        with stopped_service(cluster):
            with pytest.raises(TimeoutError, match="did not answer within"):
                RayWorkerGroup(bundles, Worker, bundle_indices_list=[[1]])
            assert living.call("add", 1).get_results(timeout=60) == [1]
        eventually(lambda: len(workers()) == 1, "the late actor is ended")
        with RayWorkerGroup(bundles, Worker, bundle_indices_list=[[1]]) as again:
            assert again.call("add", 2).get_results(timeout=60) == [2]


def test_who_is_interrupted_before_a_question_begins_takes_no_place(sessions, monkeypatch):
    monkeypatch.setattr(gate._room, "here", room := threading.BoundedSemaphore(1))

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    for what in (gate, "Future"), (threading, "Thread"):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(*what, interrupted)
            ask(lambda: 7)
    assert [room.acquire(blocking=False) for _ in range(2)] == [True, False]
