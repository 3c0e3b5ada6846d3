"""Which connection to Ray something belongs to."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

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
