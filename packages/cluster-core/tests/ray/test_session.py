"""Which connection to Ray something belongs to."""

import asyncio
import logging
import math
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import ray

from raycrew.cluster_core import ClusterClosedError, Session


@ray.remote(num_cpus=0)
def session_of_a_task():
    return Session.current()


@pytest.mark.hostile
def test_without_a_connection_there_is_no_session_and_none_is_made():
    ray.shutdown()
    assert Session.current() is None
    assert not ray.is_initialized()
    with pytest.raises(ClusterClosedError, match=r"session_x/01.*has ended.*not connected to Ray.*init_ray"):
        Session("session_x/01").check()
    assert not ray.is_initialized()


@pytest.mark.hostile
def test_waiting_over_a_session_never_joins_another_cluster(local_ray, ray_nodes_session, monkeypatch):
    session, ref = Session.current(), session_of_a_task.remote()
    assert session.wait([ref], timeout=60) == ([ref], [])
    assert session.get(ref, timeout=60) == session
    with ThreadPoolExecutor(1) as beside:
        for too_long in (math.inf, 1e300):
            assert session.wait([ref], timeout=too_long) == ([ref], [])
            assert beside.submit(session.wait, [ref], timeout=too_long).result() == ([ref], [])
            assert session.get(ref, timeout=too_long) == session
    with pytest.raises(ZeroDivisionError):
        session.get(ray.remote(num_cpus=0)(lambda: 1 / 0).remote(), timeout=60)
    ray.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", ray_nodes_session)  # where Ray would connect by itself
    for use in (session.get, lambda ref: session.wait([ref])):
        with pytest.raises(ClusterClosedError, match="has ended"):
            use(ref)
        with monkeypatch.context() as moment:
            # The session is there when it is looked for, and gone when Ray is called.
            seen = iter([session])
            moment.setattr(Session, "current", partial(next, seen, None))
            with pytest.raises(ClusterClosedError, match="has ended"):
                use(ref)
    assert not ray.is_initialized()


class Counter:
    def value(self):
        return 1


@pytest.mark.hostile
@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda counter, ref: counter.value.remote(), id="method"),
        pytest.param(lambda counter, ref: ray.kill(counter), id="kill", marks=pytest.mark.long),
        pytest.param(lambda counter, ref: ray.cancel(ref), id="cancel", marks=pytest.mark.long),
        pytest.param(lambda counter, ref: ray.put(1), id="put"),
        pytest.param(lambda counter, ref: session_of_a_task.remote(), id="task", marks=pytest.mark.long),
        pytest.param(lambda counter, ref: ray.remote(Counter).remote(), id="actor", marks=pytest.mark.long),
    ],
)
def test_nothing_over_a_session_connects(local_ray, ray_nodes_session, monkeypatch, use):
    """The session is there when it is looked for, and gone when Ray is called."""
    counter, session = ray.remote(num_cpus=0)(Counter).remote(), Session.current()
    ref = counter.value.remote()
    ray.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", ray_nodes_session)  # where Ray would connect by itself
    seen = iter([session])
    monkeypatch.setattr(Session, "current", partial(next, seen, None))
    with pytest.raises(ClusterClosedError, match="has ended"), session.while_connected():
        use(counter, ref)
    assert not ray.is_initialized()


def test_the_users_own_code_connects_by_itself_as_before(local_ray, ray_nodes_session, monkeypatch):
    session = Session.current()
    with session.while_connected():
        ref = ray.put(1)
    ray.shutdown()
    with pytest.raises(ClusterClosedError):
        session.get(ref)
    monkeypatch.setenv("RAY_ADDRESS", ray_nodes_session)
    assert ray.get(ray.put(2)) == 2
    assert ray.get_runtime_context().gcs_address == ray_nodes_session


def test_nor_is_another_thread_kept_from_connecting(local_ray, ray_nodes_session, monkeypatch):
    session = Session.current()
    with ThreadPoolExecutor(1) as pool, pytest.raises(ClusterClosedError), session.while_connected():
        ray.shutdown()
        monkeypatch.setenv("RAY_ADDRESS", ray_nodes_session)
        assert pool.submit(lambda: ray.get(ray.put(2))).result(60) == 2
        session.check()
    ray.shutdown()


class Loop:
    """An actor with coroutines; Ray warns it once of a blocking `ray.get`."""

    def __init__(self):
        self.warnings = []
        logging.getLogger("ray").addFilter(self.note)
        logging.getLogger("ray._private.worker").addFilter(self.note)

    def note(self, record):
        self.warnings.append(record.getMessage())
        return True

    async def warned(self, where):
        """Of what is got beside the event loop, or in it, over a session or without."""
        ref, session = ray.put(1), Session.current()
        use = {"thread": session.get, "loop": session.get, "user": ray.get}[where]
        assert (use(ref) if where == "loop" else await asyncio.to_thread(use, ref)) == 1
        return sum("blocking ray.get" in message for message in self.warnings)


def test_only_who_blocks_an_event_loop_is_warned_of_it(local_ray):
    for first in ("loop", "user"):
        loop = ray.remote(num_cpus=0)(Loop).remote()
        wheres = ("thread", first, "thread", first)
        told = [ray.get(loop.warned.remote(where), timeout=60) for where in wheres]
        assert told == [0, 1, 1, 1]


def test_a_session_is_the_same_for_a_driver_its_threads_and_its_workers(local_ray):
    session = Session.current()
    assert session == Session.current()
    session.check()
    pickle.loads(pickle.dumps(session)).check()
    assert ray.get(session_of_a_task.remote(), timeout=60) == session
    found = []
    thread = threading.Thread(target=lambda: found.append(Session.current()))
    thread.start()
    thread.join()
    assert found == [session]


@pytest.mark.hostile
def test_a_new_connection_to_the_same_cluster_is_another_session(local_ray):
    first = Session.current()
    ray.shutdown()
    ray.init(address=local_ray, log_to_driver=False, logging_level="WARNING")
    second = Session.current()
    assert second is not None and second != first
    with pytest.raises(ClusterClosedError, match=f"{first.id}, has ended; now it is {second.id}"):
        first.check()
    second.check()


@pytest.mark.hostile
def test_a_shutdown_in_another_thread_is_seen_as_none_never_as_an_error(local_ray):
    over = threading.Event()

    def look():
        found = {Session.current()}
        while not over.is_set():
            found.add(Session.current())
        return found

    with ThreadPoolExecutor(3) as pool:
        looks = [pool.submit(look) for _ in range(3)]
        for _ in range(3):
            ray.shutdown()
            ray.init(address=local_ray, log_to_driver=False, logging_level="WARNING")
        over.set()
        assert all(None in look.result(60) for look in looks)
