"""What is left after the user shut Ray down or connected anew, and threads that race."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from watching import live_groups, wait_until

from raycrew.cluster_core import ClusterClosedError, RayVirtualCluster, Session, init_ray
from raycrew.cluster_core._connection import init as _init
from raycrew.cluster_core._placement.allocation import Allocation

pytestmark = pytest.mark.hostile


def connect_again(address):
    ray.shutdown()
    ray.init(address=address, log_to_driver=False, logging_level="WARNING")


@pytest.fixture(params=["ended", "another"])
def end(request, local_ray):
    """Ends the connection; with "another" there is a new one afterwards."""

    def end():
        ray.shutdown()
        if request.param == "another":
            connect_again(local_ray)

    yield end
    if not ray.is_initialized():
        connect_again(local_ray)


def test_a_cluster_of_another_session_says_so_and_touches_nothing(end):
    cluster = RayVirtualCluster([2], use_gpus=False, monitor_memory=True)
    claim = cluster.claim(None, "mine")
    cluster.rendezvous()
    nodes = cluster.run_on_each_node(os.getpid)
    assert cluster.session == Session.current()
    end()
    after = Session.current()
    for use in (
        lambda: cluster.bundles,
        lambda: cluster.claim(None, "late"),
        lambda: cluster.rendezvous(),
        lambda: cluster.run_on_each_node(os.getpid),
        lambda: next(nodes),
        cluster.check_nodes,
        cluster.holders,
        cluster.memory_usage,
        cluster.get_placement_groups,
    ):
        with pytest.raises(ClusterClosedError, match="has ended"):
            use()
    assert "has ended" in cluster._repr_html_(), "a notebook shows it all the same"
    claim.release()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cluster.shutdown()
        cluster.shutdown()
    assert Session.current() == after
    with pytest.raises(ClusterClosedError, match="was shut down"):
        cluster.holders()


def test_a_shutdown_that_was_interrupted_can_be_repeated_and_nothing_else(local_ray, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    cluster = RayVirtualCluster([1], use_gpus=False)
    cluster.rendezvous()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Allocation, "give_back", interrupted)
        cluster.shutdown()
    assert "shut down" in repr(cluster) and live_groups()
    for use in (cluster.holders, cluster.rendezvous, cluster.check_nodes):
        with pytest.raises(ClusterClosedError, match="being shut down"):
            use()
    cluster.shutdown()
    with pytest.raises(ClusterClosedError, match="was shut down"):
        cluster.holders()
    assert not live_groups()


def test_what_is_forgotten_in_the_middle_of_its_shutdown_is_given_back(local_ray, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    cluster = RayVirtualCluster([1], use_gpus=False, name="cell")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Allocation, "give_back", interrupted)
        cluster.shutdown()
    with pytest.warns(ResourceWarning, match="'cell' was forgotten"):
        del cluster
        gc.collect()
    wait_until(lambda: not live_groups())


def test_slots_that_an_actor_keeps_are_released_quietly_over_another_session(end):
    cluster = RayVirtualCluster([1], use_gpus=False)
    ray.put(cluster)
    claim = cluster.claim(None, "mine")
    end()
    after = Session.current()
    claim.release()
    with pytest.raises(ClusterClosedError):
        claim.actor_options(0)
    cluster.shutdown()
    assert Session.current() == after


def test_a_connection_of_another_session_is_closed_and_ends_nothing(local_ray):
    ray.shutdown()
    stale = init_ray(local_ray)
    connect_again(local_ray)  # The user's own, from now on.
    users = Session.current()
    assert stale.closed and stale.session != users
    with pytest.raises(ClusterClosedError, match=r"init_ray\(\)"):
        stale.child_env()
    fresh = init_ray()
    assert fresh is not stale and not fresh.closed and fresh.session == users
    for connection in (stale, fresh):
        connection.close()
        assert Session.current() == users, "it ended the user's own runtime"


def test_threads_that_init_together_get_one_connection(local_ray, monkeypatch):
    ray.shutdown()
    joined, barrier, join = [], threading.Barrier(3), _init._join

    def count(*arguments):
        joined.append(arguments)
        return join(*arguments)

    def enter(_):
        barrier.wait(60)
        return init_ray(local_ray)

    monkeypatch.setattr(_init, "_join", count)
    with ThreadPoolExecutor(3) as pool:
        connections = list(pool.map(enter, range(3)))
    assert len(joined) == 1 and len(set(map(id, connections))) == 1
    connections[0].close()
    connect_again(local_ray)


def test_threads_that_shut_down_together_all_return_after_the_end(local_ray):
    cluster = RayVirtualCluster([1, 1, 1], use_gpus=False)
    cluster.rendezvous()
    barrier = threading.Barrier(4)

    def leave(_):
        barrier.wait(60)
        cluster.shutdown()
        return live_groups()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(leave, range(4))) == [[]] * 4


@pytest.mark.parametrize("monitored", [False, True])
def test_a_forgotten_cluster_is_given_back(local_ray, monitored):
    with pytest.warns(ResourceWarning, match="'cell' was forgotten without shutdown"):
        cluster = RayVirtualCluster([2], use_gpus=False, name="cell", monitor_memory=monitored)
        cluster.rendezvous()
        monitor = cluster.memory_monitor
        del cluster
        wait_until(lambda: gc.collect() or not live_groups())
    if monitor is not None:
        wait_until(lambda: not monitor._thread.is_alive())


def test_a_claim_keeps_its_cluster_from_being_forgotten(local_ray):
    claim = RayVirtualCluster([2], use_gpus=False).claim(None, "mine")
    gc.collect()
    assert len(live_groups()) == 1
    with pytest.warns(ResourceWarning, match="forgotten"):
        claim.release()
    wait_until(lambda: not live_groups())


def forget(claim):
    """The claim is forgotten in a cycle, so that the collector finds it in the middle of anything."""
    cycle = [claim]
    cycle.append(cycle)


@pytest.mark.parametrize("shared", [False, True], ids=["own ledger", "shared ledger"])
def test_a_forgotten_claim_is_given_back(local_ray, shared):
    with RayVirtualCluster([2], use_gpus=False) as cluster:
        if shared:
            ray.put(cluster)
        with pytest.warns(ResourceWarning, match="claim of 'a lost cell' was forgotten without release"):
            forget(cluster.claim([1], "a lost cell"))  # the collector may find it at once
            kept = cluster.claim([0], "kept")
            gc.collect()
        wait_until(lambda: cluster.holders() == {0: ("kept",)})
        kept.release()
        assert not cluster.holders()


def test_a_claim_that_was_released_or_ended_with_its_cluster_is_forgotten_quietly(local_ray):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with RayVirtualCluster([2], use_gpus=False) as cluster:
            claim = cluster.claim([1], "mine")
            claim.release()
            del claim
            forget(cluster.claim([0], "mine"))
        gc.collect()
    with pytest.warns(ResourceWarning, match="forgotten"):
        warnings.warn("forgotten", ResourceWarning, stacklevel=1)


def test_claims_are_forgotten_while_others_are_made(local_ray):
    """The collector runs within the ledger's own lock."""
    with RayVirtualCluster([4], use_gpus=False, max_colocated_worker_groups=64, cpus_per_bundle=1) as cluster:
        before = gc.get_threshold()
        gc.set_threshold(1)
        try:
            with warnings.catch_warnings(), ThreadPoolExecutor(4) as pool:
                warnings.simplefilter("ignore")
                list(pool.map(lambda i: forget(cluster._held.claims.claim([i % 4], str(i))), range(200)))
        finally:
            gc.set_threshold(*before)
        wait_until(lambda: gc.collect() + 1 and not cluster.holders())


def test_what_is_forgotten_over_another_session_is_left_alone(end):
    cluster = RayVirtualCluster([1], use_gpus=False)
    end()
    after = Session.current()
    with pytest.warns(ResourceWarning):
        del cluster
        gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Session.current() == after


FORKING = """
    import os, ray, sys
    from raycrew.cluster_core import ClusterClosedError, RayVirtualCluster, Session
    ray.init(address=sys.argv[1], log_to_driver=False)
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        claim = cluster.claim(None, "mine")
        child = os.fork()
        if child == 0:
            try:
                cluster.check_nodes()
            except ClusterClosedError:
                code = 0 if Session.current() is None else 2
            else:
                code = 3
            cluster.shutdown()
            claim.release()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        cluster.check_nodes()
        assert cluster.holders() == {0: ("mine",)}
        claim.release()
    print("end", flush=True)
"""


def test_a_forked_child_has_no_connection_and_leaves_its_parents_alone(local_ray):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FORKING), local_ray],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr
    wait_until(lambda: not live_groups())


FORGETFUL = """
    import atexit, gc, ray, sys
    from raycrew.cluster_core import RayVirtualCluster
    ray.init(address=sys.argv[1], log_to_driver=False)
    cycle = [RayVirtualCluster([1], use_gpus=False)]
    cycle.append(cycle)
    kept = RayVirtualCluster([1], use_gpus=False)
    if sys.argv[2] == "collected":
        del cycle
        gc.collect()
    elif sys.argv[2] == "at exit":  # where no thread can be started from Python 3.12 on
        atexit.register(kept.shutdown)
    print("end", flush=True)
"""


@pytest.mark.parametrize("how", ["collected", "kept", pytest.param("at exit", marks=pytest.mark.smoke)])
def test_a_driver_that_forgets_its_clusters_ends_well(local_ray, how):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FORGETFUL), local_ray, how],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    wait_until(lambda: not live_groups())
