"""What was made over one connection to Ray never joins another."""

import asyncio
import itertools
import sys
import threading
import time
from pathlib import Path

import pytest
import ray
from forking import assert_ends_well
from patience import eventually, within
from workers import Worker

from raycrew.cluster_core import RayVirtualCluster, Session
from raycrew.cluster_core.testing import FakeCluster, connected
from raycrew.worker_groups import (
    RayWorkerGroup,
    WorkerGroupClosedError,
    WorkerGroupError,
    _ray,
    fan_out,
    fan_out_as_completed,
)
from raycrew.worker_groups._calls.answers import telling
from raycrew.worker_groups._health import look
from raycrew.worker_groups._ray import check_session

pytestmark = pytest.mark.hostile


@pytest.fixture
def group(local_ray):
    made = RayWorkerGroup(RayVirtualCluster([2], use_gpus=False), Worker, enable_load_balancing=True)
    yield made
    made.shutdown(force=True)


async def awaited(future):
    return await future


def assert_closed(group, future, stream, single):
    """At once: whoever let Ray connect to another cluster waited for minutes."""
    with within(60):
        _assert_closed(group, future, stream, single)


def _assert_closed(group, future, stream, single):
    for use in (
        lambda: future.get_results(timeout=5),
        lambda: list(future.as_completed(timeout=5)),
        lambda: asyncio.run(awaited(future)),
        lambda: stream.get_results(timeout=5),
        lambda: list(stream.as_completed(timeout=5)),
        lambda: single.get_results(timeout=5),
        lambda: group.call("pid"),
        lambda: group.stream("count_to", 1),
        lambda: group.on(ranks=[0]).call("pid"),
        group.get_worker_status,
        group.restart_failed_workers,
        lambda: group.balancer.call("pid"),
        lambda: list(group.balancer.map("nap", [0, 0])),
        group.balancer.loads,
    ):
        with pytest.raises(WorkerGroupClosedError, match="connection to Ray"):
            use()
    future.cancel()


def begun(group):
    return group.call("nap", 3600), group.call("count_to", 3), group.balancer.call("pid")


def test_after_the_users_own_shutdown_nothing_joins_a_cluster(group, local_ray_session, monkeypatch):
    calls = begun(group)
    ray.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", local_ray_session)  # where Ray would connect by itself
    assert_closed(group, *calls)
    assert not group.shutdown()
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    "other", ["local_ray_session", pytest.param("ray_nodes_session", marks=pytest.mark.long)]
)
def test_nor_does_it_use_a_later_connection(group, other, request):
    calls = begun(group)
    ray.shutdown()
    with connected(request.getfixturevalue(other)):
        assert_closed(group, *calls)
        assert not group.shutdown()


def test_others_are_told_of_no_group_of_an_earlier_connection(group, local_ray_session):
    assert group.name in [one.record.name for one in look()]
    ray.shutdown()
    with (
        connected(local_ray_session),
        RayVirtualCluster([1], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker, name_prefix="later"),
    ):
        eventually(
            lambda: [one.record.name for one in look()] == ["later"], "Ray ends workers of the earlier one"
        )


def functions_of(thread):
    """The names of the functions in which a thread is."""
    found, frame = [], sys._current_frames().get(thread.ident)
    while frame is not None:
        found.append(frame.f_code.co_name)
        frame = frame.f_back
    return found


def test_a_wait_ends_with_the_connection(group, tmp_path):
    future = group.call("wait_for", str(tmp_path / "gate"))
    outcomes = []

    def wait():
        try:
            outcomes.append(future.get_results())
        except WorkerGroupClosedError as error:
            outcomes.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    eventually(lambda: "settle" in functions_of(waiting), "the thread waits")
    ray.shutdown()
    eventually(lambda: outcomes, "the wait has ended")
    assert isinstance(outcomes[0], WorkerGroupClosedError)
    assert not ray.is_initialized()


async def awaited_soon(future):
    return await asyncio.wait_for(future, 60)


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda calls: calls[0].get_results(timeout=60), id="get"),
        pytest.param(
            lambda calls: list(calls[0].as_completed(timeout=60)), id="as_completed", marks=pytest.mark.long
        ),
        pytest.param(lambda calls: asyncio.run(awaited_soon(calls[0])), id="await", marks=pytest.mark.long),
        pytest.param(lambda calls: calls[1].get_results(timeout=60), id="stream", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(1, id="at its first look"),
        pytest.param(2, id="at its second look", marks=pytest.mark.long),
    ],
)
def test_a_shutdown_at_the_moment_at_which_a_wait_begins_ends_it(
    group, local_ray_session, monkeypatch, use, moment
):
    """The connection is there when a wait looks for it, and gone when Ray is called."""
    calls, looks = begun(group), []

    def check_and_shut_down(*arguments):
        check_session(*arguments)
        looks.append(1)
        if len(looks) == moment:
            ray.shutdown()

    monkeypatch.setattr(telling, "check_session", check_and_shut_down)
    monkeypatch.setenv("RAY_ADDRESS", local_ray_session)  # where Ray would connect by itself
    with pytest.raises(WorkerGroupClosedError, match="connection to Ray"):
        use(calls)
    assert not ray.is_initialized()


def wait_for(path):
    while not path.exists():
        time.sleep(0.01)


def test_a_fan_out_ends_with_the_connection(local_ray, tmp_path):
    outcomes = []

    def spread():
        try:
            outcomes.append(fan_out(wait_for, [tmp_path / "gate"]))
        except BaseException as error:  # noqa: BLE001 - Ray ends threads by SystemExit
            outcomes.append(error)

    waiting = threading.Thread(target=spread, daemon=True)
    waiting.start()
    eventually(lambda: {"_wait", "wait"} <= set(functions_of(waiting)), "the thread waits")
    ray.shutdown()
    eventually(lambda: outcomes, "the wait has ended")
    assert isinstance(outcomes[0], WorkerGroupClosedError), outcomes
    assert not ray.is_initialized()


def double(item):
    return 2 * item


@pytest.mark.long  # in short: test_a_connection_that_ends_while_a_fan_out_begins
def test_a_fan_out_after_the_users_own_shutdown_starts_no_cluster(local_ray):
    outcomes = fan_out_as_completed(double, range(100), batch_size=1)
    next(outcomes)
    ray.shutdown()
    with pytest.raises(WorkerGroupClosedError, match="connection to Ray"):
        list(outcomes)
    assert not ray.is_initialized()


@pytest.mark.parametrize(("question", "time_of_asking"), [("node_cpus", 2), ("start_actor", 1)])
def test_a_connection_that_ends_while_a_fan_out_begins(local_ray, monkeypatch, question, time_of_asking):
    asked = getattr(_ray, question)
    times = itertools.count(1)

    def shut_down_and_ask(*args):
        if next(times) == time_of_asking:
            ray.shutdown()
        return asked(*args)

    monkeypatch.setattr(_ray, question, shut_down_and_ask)
    with pytest.raises(WorkerGroupClosedError, match="connection to Ray"):
        fan_out(double, range(4))
    assert not ray.is_initialized()


def test_a_start_ends_with_the_connection(local_ray, tmp_path):
    cluster, outcomes = RayVirtualCluster([1], use_gpus=False), []

    def start():
        try:
            outcomes.append(RayWorkerGroup(cluster, WaitsToStart, folder=str(tmp_path)))
        except Exception as error:  # noqa: BLE001 - looked at below
            outcomes.append(error)

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    eventually((tmp_path / "waits").exists, "a worker is starting")
    ray.shutdown()
    eventually(lambda: outcomes, "the start has ended")
    assert isinstance(outcomes[0], WorkerGroupClosedError), outcomes
    assert "has ended" in str(outcomes[0])
    assert not ray.is_initialized()


class WaitsToStart:
    def __init__(self, folder):
        Path(folder, "waits").touch()
        time.sleep(3600)


FORKING = """
    import os, ray, sys
    from raycrew.cluster_core import RayVirtualCluster
    from raycrew.worker_groups import RayWorkerGroup, WorkerGroupClosedError
    from workers import Worker
    ray.init(address=sys.argv[1], log_to_driver=False)
    with RayVirtualCluster([1], use_gpus=False) as cluster, RayWorkerGroup(cluster, Worker) as group:
        future = group.call("add", 1)
        child = os.fork()
        if child == 0:
            code = 0
            for use in (lambda: group.call("add", 1), future.get_results, group.restart_failed_workers):
                try:
                    use()
                    code = 3
                except WorkerGroupClosedError:
                    pass
            ended = group.shutdown()
            os._exit(4 if ended else code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert future.get_results(timeout=60) == [1]
        assert group.call("add", 2).get_results(timeout=60) == [2]
    print("end", flush=True)
"""


def test_a_forked_child_leaves_its_parents_group_alone(local_ray):
    assert_ends_well(FORKING, local_ray)


def test_a_group_is_not_started_by_ray_of_its_own_accord():
    ray.shutdown()
    with pytest.raises(WorkerGroupError, match="not connected to Ray"):
        RayWorkerGroup(FakeCluster([1]), Worker)
    assert not ray.is_initialized()


def read(carried):
    return carried["future"].get_results(timeout=60), Session.current().id


def test_a_future_is_read_in_a_task(group):
    carried = {"future": group.call("add", 1)}
    read_there = ray.remote(num_cpus=1)(read).remote(carried)
    assert ray.get(read_there, timeout=200) == ([1, 1], Session.current().id)


def drive(carried):
    before = carried["future"].get_results(timeout=60)
    with RayVirtualCluster([1], use_gpus=False) as cluster, RayWorkerGroup(cluster, Worker) as group:
        return before, group.call("add", 2).get_results(timeout=60), Session.current().id


@pytest.mark.long  # in short: test_a_future_is_read_in_a_task
def test_driver_code_may_run_in_a_task(group):
    future = group.call("add", 1)
    before, own, session = ray.get(ray.remote(num_cpus=1)(drive).remote({"future": future}), timeout=200)
    assert (before, own) == ([1, 1], [2])
    assert session == Session.current().id
