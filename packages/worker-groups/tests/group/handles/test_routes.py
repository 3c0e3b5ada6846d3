import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from handled_workers import Rollout
from patience import PATIENCE_S, eventually
from ray.exceptions import ActorDiedError, GetTimeoutError

from raycrew.cluster_core import ClusterClosedError
from raycrew.worker_groups import GroupHandle, WorkerFailureError, WorkerGroupClosedError, WorkerGroupError
from raycrew.worker_groups._calls import MultiWorkerFuture, Recovery
from raycrew.worker_groups._calls.answers import endings
from raycrew.worker_groups._group.handles import Contact, Members, RayRoute, directory, routes
from raycrew.worker_groups._group.handles.directory import Address, DirectoryGoneError
from raycrew.worker_groups._ray import gate, sessions
from raycrew.worker_groups._worker import describe_class
from raycrew.worker_groups.sharding._ranks import RankInfo
from raycrew.worker_groups.testing import InProcessFuture

pytestmark = pytest.mark.hostile

FIRST = RankInfo(0, 2, 0, 2, 0, "node", "127.0.0.1", 0, None, "127.0.0.1", 0, (), "policy")
STEADY = SimpleNamespace(check=lambda: None)


class Asked:
    """A directory with these answers, and none that is newer after that."""

    group_name = "policy"

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), 0

    def newer_than(self, generation, check=None):
        self.asked += 1
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer


class Lost(InProcessFuture):
    """A call that has ended with its worker."""

    def _died(self, end):
        return True


def members(generation):
    ranks = [replace(FIRST, rank=rank, generation=generation) for rank in range(2)]
    return Members([None, None], ranks, [SimpleNamespace(node_id="node", pid=1)] * 2, [[0], [1]])


def handle_of(address, session=STEADY):
    contact = Contact(address, describe_class(Rollout, {}), None, True, "round_robin", (), session)
    return GroupHandle(RayRoute(contact, members(0)))


@pytest.fixture
def every_call_is_lost(monkeypatch):
    def send(dispatch, handles, places, *, recovery, **options):
        call = Future()
        call.set_result(None)
        return Lost([call], [dispatch.sends[0].rank], places=places, recovery=recovery)

    monkeypatch.setattr(routes, "send_to_actors", send)


def living(handle):
    return [load.rank for load in handle.balancer.loads()]


def test_who_does_not_answer_is_not_asked_at_each_look():
    who = Asked(GetTimeoutError("no answer"))
    handle = handle_of(who)
    handle._route._misses_some = True
    assert (repr(handle), len(handle)) == ("GroupHandle('policy', 2 workers, generation 0)", 2)
    assert who.asked == 0
    for _ in range(3):
        assert (handle.generation, handle._route.shape().world_size) == (0, 2)
    assert who.asked == 1


def test_of_several_threads_one_asks_who_does_not_answer():
    begun = threading.Barrier(8)

    class Silent(Asked):
        def newer_than(self, generation, check=None):
            time.sleep(0.05)
            return super().newer_than(generation)

    who = Silent(*[GetTimeoutError("no answer")] * 8)
    handle = handle_of(who)
    handle._route._misses_some = True

    def look(_):
        begun.wait(PATIENCE_S)
        error = WorkerFailureError("rank 1 died", cause=ActorDiedError())
        assert handle.generation == 0 and not handle._route._after_death(0, error)
        return error.__notes__[0]

    with ThreadPoolExecutor(8) as threads:
        notes = list(threads.map(look, range(8)))
    assert who.asked == 1
    assert all("who the group's members are now is not known" in note for note in notes)


def test_a_forked_process_waits_for_no_lock_of_another_thread():
    def ended():
        raise WorkerGroupClosedError("this process is not connected to Ray")

    held, done = threading.Event(), threading.Event()
    handle = handle_of(Asked(), SimpleNamespace(check=ended))
    handle._route._misses_some = True

    def hold():
        with handle._route._lock:
            held.set()
            done.wait(PATIENCE_S)

    with ThreadPoolExecutor(2) as threads:
        threads.submit(hold)
        assert held.wait(PATIENCE_S)
        for use in (lambda: handle.generation, lambda: handle.call("pid"), handle.refresh):
            with pytest.raises(WorkerGroupClosedError, match="not connected"):
                threads.submit(use).result(PATIENCE_S)
        done.set()


def other_members(generation):
    return "another key", members(9)


@pytest.mark.parametrize(
    "others",
    [
        SimpleNamespace(),
        SimpleNamespace(newer_than=lambda generation: None),
        SimpleNamespace(newer_than=SimpleNamespace(remote=lambda: None)),
        SimpleNamespace(newer_than=SimpleNamespace(remote=other_members)),
        SimpleNamespace(newer_than=SimpleNamespace(remote=lambda generation: members(9))),
        SimpleNamespace(newer_than=SimpleNamespace(remote=lambda generation: None)),
    ],
)
def test_an_actor_of_others_that_has_got_the_name_is_not_believed(monkeypatch, others):
    session = SimpleNamespace(
        check=lambda: None, while_connected=nullcontext, get=lambda found, timeout: found
    )
    monkeypatch.setattr(sessions, "current_session", lambda: session)
    monkeypatch.setattr(directory, "find_actor", lambda *_: others)
    monkeypatch.setattr(routes, "actor_states", lambda *_: {0: "ready", 1: "ready"})
    handle = handle_of(Address("policy", "actor", "namespace", "key"), session)
    with pytest.raises(WorkerGroupError, match="is another actor now"):
        handle.refresh()
    assert handle.generation == 0


@pytest.mark.parametrize("states", [("dead", "busy"), ("ready", "ready")])
def test_a_group_whose_members_live_has_not_ended_with_its_directory(monkeypatch, states):
    monkeypatch.setattr(routes, "actor_states", lambda *_: dict(enumerate(states)), raising=False)
    monkeypatch.setattr(routes, "while_connected", nullcontext, raising=False)
    handle = handle_of(Asked(DirectoryGoneError("nobody knows"), DirectoryGoneError("nobody knows")))
    handle._route._misses_some = True
    assert handle._route.shape().world_size == 2
    with pytest.raises(WorkerGroupError, match="nobody knows"):
        handle.refresh()


def test_a_group_has_ended_where_neither_its_directory_nor_a_member_is_left(monkeypatch):
    monkeypatch.setattr(routes, "actor_states", lambda *_: {0: "dead", 1: "dead"})
    monkeypatch.setattr(routes, "while_connected", nullcontext)
    handle = handle_of(Asked(*[DirectoryGoneError("nobody knows")] * 2))
    handle._route._misses_some = True
    for _ in range(2):
        with pytest.raises(WorkerGroupClosedError, match="'policy' was shut down, or all of it was lost"):
            handle.call("pid")


def test_a_balancer_goes_on_with_new_workers_though_nobody_took_the_lost_result(every_call_is_lost):
    handle = handle_of(Asked(members(1)))
    handle.balancer.call("pid")
    assert (living(handle), handle.generation) == ([0, 1], 1)


def test_a_balancer_calls_no_worker_that_was_lost_in_the_generation_that_it_was_called_in(every_call_is_lost):
    handle = handle_of(Asked(None, members(1)))
    handle._route._misses_some = True
    handle.balancer.call("pid")  # it asks twice, and finds the new generation between choosing and sending
    assert (handle.generation, living(handle)) == (1, [1])


def test_the_end_of_the_connection_is_told_as_such(monkeypatch):
    class Ending:
        has_ended = False

        def check(self):
            if self.has_ended:
                raise ClusterClosedError("the connection has ended")

        while_connected = nullcontext

        def get(self, ref, timeout=None):
            self.has_ended = True
            self.check()

    session = Ending()
    for module in (gate, sessions, directory):
        monkeypatch.setattr(module, "current_session", lambda: session)
    who = SimpleNamespace(newer_than=SimpleNamespace(remote=lambda generation: None))
    monkeypatch.setattr(directory, "find_actor", lambda *_: who)
    with pytest.raises(WorkerGroupClosedError, match="the connection has ended"):
        handle_of(Address("policy", "actor", "namespace", "key"), session).refresh()


@pytest.mark.parametrize("ways", [("wait",), ("done", "done"), ("wait", "done", "wait")])
def test_who_only_waits_for_the_end_of_a_call_tells_once_of_its_lost_worker(monkeypatch, ways):
    class Ended(MultiWorkerFuture):
        def _check(self):
            pass

        def _died(self, end):
            return True

    told = []
    monkeypatch.setattr(endings, "await_some", lambda ends, *_, **__: list(ends))
    recovery = Recovery(lambda _: False, seen=lambda: told.append("lost"))
    call = Ended(["a call"], [0], session=STEADY, recovery=recovery)
    assert all(getattr(call, way)() for way in ways)
    assert told == ["lost"]


def resized(generation, n):
    ranks = [replace(FIRST, rank=rank, generation=generation, world_size=n) for rank in range(n)]
    process = SimpleNamespace(node_id="node", pid=1)
    return Members([None] * n, ranks, [process] * n, [[rank] for rank in range(n)])


def test_a_handle_hears_of_who_joins_and_leaves_though_nobody_has_died(monkeypatch):
    address = Asked(resized(1, 3), None, resized(2, 1))
    handle = handle_of(address)
    handle._open()
    assert (handle.world_size, address.asked) == (2, 0), "not before it is time to"
    monkeypatch.setattr(routes, "_FOLLOW_S", 0.0)
    assert handle._open().world_size <= 3
    eventually(lambda: handle.world_size == 3, "it has heard of a newcomer")
    eventually(lambda: handle._open().world_size == 1, "and of who left")
    eventually(lambda: handle.generation == 2, "it is of that generation")


def test_a_handle_that_hears_nothing_goes_on_with_whom_it_knows(monkeypatch):
    monkeypatch.setattr(routes, "_FOLLOW_S", 0.0)
    address = Asked(DirectoryGoneError("gone"), WorkerGroupError("late"))
    handle = handle_of(address)
    for asked in (1, 2):
        handle._open()
        eventually(lambda asked=asked: address.asked == asked, "it has asked")
    assert (handle.world_size, handle.generation) == (2, 0)


def test_what_an_older_answer_says_is_not_taken():
    handle = handle_of(Asked(resized(1, 3), resized(0, 1)))
    handle._route._follow()
    handle._route._follow()
    assert (handle.world_size, handle.generation) == (3, 1)
