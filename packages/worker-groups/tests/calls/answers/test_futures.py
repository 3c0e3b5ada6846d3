import asyncio
import os
import signal
import threading
from itertools import pairwise

import pytest
import ray
from patience import PATIENCE_S, eventually
from workers import AsyncWorker, Worker

from raycrew.cluster_core import RayVirtualCluster
from raycrew.cluster_core.testing import connected
from raycrew.worker_groups import RayWorkerGroup, ResultTimeoutError, WorkerFailureError, WorkerFailuresError
from raycrew.worker_groups._calls.answers import futures as _futures
from raycrew.worker_groups._ray.compat import runs_in_order
from raycrew.worker_groups._ray.nodes import run_on_node

MARKS = ({"^"}, {"~"}, {"~", "^"})


@pytest.fixture(scope="module")
def group(local_ray_session):
    with (
        connected(local_ray_session),
        RayVirtualCluster([3], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker) as made,
    ):
        yield made


@pytest.fixture
def gate(tmp_path):
    """What holds workers back until it is touched, at the latest after the test."""
    made = tmp_path / "gate"
    yield made
    made.touch()


@pytest.mark.smoke
def test_a_failure_is_attributed_and_found_while_others_run(group, gate):
    with pytest.raises(WorkerFailureError) as caught:
        group.call("fail_on", [1], gate=str(gate)).get_results()
    error = caught.value
    assert (error.rank, error.method, error.group_name, error.pending) == (1, "fail_on", "Worker", (0, 2))
    assert error.pid is not None
    assert error.node_id == ray.get_runtime_context().get_node_id()
    assert isinstance(error.cause, ValueError)
    assert "ValueError: rank 1 was told to fail" in error.traceback
    marked = [
        above for above, line in pairwise(error.traceback.splitlines()) if set(line.strip(" |")) in MARKS
    ]
    assert not [above for above in marked if above.strip(" |").startswith("File ")], "marks of no line"
    assert "the last words" in error.log_tail
    assert error.elapsed_s is not None


def test_several_failures_come_together(group):
    with pytest.raises(WorkerFailuresError) as caught:
        group.call("fail_on", [0, 2]).get_results()
    assert [part.rank for part in caught.value.exceptions] == [0, 2]
    assert [str(part.cause) for part in caught.value.exceptions] == [
        "rank 0 was told to fail",
        "rank 2 was told to fail",
    ]


def test_a_timeout_does_not_consume(group, gate):
    future = group.run_all_workers_multiple_data("wait_for", [None, None, str(gate)])
    ray.wait(future[:2], num_returns=2)
    with pytest.raises(ResultTimeoutError, match=r"ranks \[2\] have not answered") as caught:
        future.get_results(timeout=0.5)
    assert caught.value.pending == (2,)
    gate.touch()
    assert future.get_results() == [0, 1, 2]
    assert future.get(timeout=60) == [0, 1, 2]


def test_the_deadline_of_a_call(group, gate):
    future = group.call("wait_for", str(gate), timeout=0.2)
    with pytest.raises(ResultTimeoutError):
        future.get_results()
    with pytest.raises(ResultTimeoutError):
        group.on(timeout=0.2).call(Worker.wait_for, str(gate)).get_results()
    gate.touch()
    assert ray.get(future) == [0, 1, 2]


def test_results_come_as_they_are_done(group, gate, tmp_path):
    results = group.run_all_workers_multiple_data("wait_for", [str(gate), None, None]).as_completed()
    assert sorted([next(results), next(results)]) == [(1, 1), (2, 2)]
    gate.touch()
    assert list(results) == [(0, 0)]
    second = tmp_path / "second gate"
    with pytest.raises(ResultTimeoutError):
        list(group.call("wait_for", str(second)).as_completed(timeout=0.3))
    second.touch()
    with pytest.raises(WorkerFailureError, match="told to fail"):
        list(group.call("fail_on", [2]).as_completed())


def test_ray_get_takes_it(group):
    assert ray.get(group.call("add", 1)) == [1, 1, 1]
    assert len(group.call("add", 1).futures) == 3


def test_it_can_be_awaited(group, gate):
    async def both():
        return await asyncio.gather(group.call("add", 1), group.call("add", 2))

    assert asyncio.run(both()) == [[1] * 3, [2] * 3]

    async def failing():
        await group.call("fail_on", [1])

    with pytest.raises(WorkerFailureError, match="rank 1"):
        asyncio.run(failing())

    async def late():
        await group.call("wait_for", str(gate), timeout=0.2)

    with pytest.raises(ResultTimeoutError):
        asyncio.run(late())
    gate.touch()

    async def stream():
        return await group.call("count_to", 2)

    assert asyncio.run(stream()) == [[0, 1]] * 3


def test_every_reader_of_a_stream_sees_every_item(group):
    future = group.call("count_to", 3)
    one, other = future.as_completed(), future.as_completed()
    seen = [next(one), next(other), next(other), *one]
    assert sorted([seen[0], *seen[3:]]) == sorted((rank, i) for rank in range(3) for i in range(3))
    assert len([*seen[1:3], *other]) == 9
    assert future.get_results() == [[0, 1, 2]] * 3
    assert sorted(future.as_completed()) == sorted((rank, i) for rank in range(3) for i in range(3))


def test_items_of_a_stream_arrive_before_its_end_and_a_timeout_consumes_none(group, gate):
    future = group.call("count_and_wait_for", 2, str(gate))
    items = future.as_completed()
    assert sorted(next(items) for _ in range(6)) == [(rank, i) for rank in range(3) for i in range(2)]
    with pytest.raises(ResultTimeoutError, match=r"ranks \[0, 1, 2\] have not answered"):
        future.get_results(timeout=0.3)
    gate.touch()
    assert sorted(items) == [(rank, "end") for rank in range(3)]
    assert future.get_results() == [[0, 1, "end"]] * 3


def test_a_broken_stream_is_told_at_every_look(group):
    future = group.call("count_and_fail_on", [1], 2)
    for _ in range(2):
        with pytest.raises(WorkerFailureError, match="no more numbers") as caught:
            future.get_results()
        assert caught.value.rank == 1
        items = future.as_completed()
        seen = []
        with pytest.raises(WorkerFailureError, match="no more numbers"):
            seen += items
        assert [item for rank, item in seen if rank == 1] == [0, 1]


def test_calls_that_have_not_begun_can_be_cancelled_and_later_ones_are_answered(group, gate):
    group.call("keep", "before").get_results()
    busy = group.call("wait_for", str(gate))
    given_up = [group.call("keep", i) for i in range(20)]
    given_up += [group.on(ranks=[1, 2]).call("keep", busy[0]), group.call("count_to", 2)]
    for future in given_up:
        future.cancel()
    after = group.call("get_kept")
    gate.touch()
    assert after.get_results() == ["before"] * 3
    for future in given_up:
        with pytest.raises(WorkerFailureError, match="cancelled before it began") as caught:
            future.get_results()
        assert isinstance(caught.value.cause, ray.exceptions.TaskCancelledError)
    assert busy.get_results() == [0, 1, 2]
    busy.cancel()
    assert busy.get_results() == [0, 1, 2]


def test_calls_are_cancelled_by_a_task_that_never_began_to_await_them(group, gate):
    group.call("keep", "before").get_results()
    busy = group.call("wait_for", str(gate))
    given_up = [group.call("keep", "cancelled"), group.call("keep", "late"), group.call("count_to", 2)]

    async def give_up():
        for future in (given_up[0], given_up[2]):
            task = asyncio.create_task(future)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(given_up[1], 0)

    asyncio.run(give_up())
    cancelling = [one for one in threading.enumerate() if one.name == "raycrew-cancel"]
    for thread in cancelling:
        thread.join(PATIENCE_S)
    after = group.call("get_kept")
    gate.touch()
    assert (busy.get_results(), after.get_results()) == ([0, 1, 2], ["before"] * 3)
    for future in given_up:
        with pytest.raises(WorkerFailureError, match="cancelled before it began"):
            future.get_results()


def test_workers_of_other_nodes_are_told_by_a_task_there(group, gate, monkeypatch):
    told = []
    monkeypatch.setattr(_futures, "recall", lambda *call: False)
    monkeypatch.setattr(_futures, "run_on_node", lambda *a, **k: told.append(run_on_node(*a, **k)))
    group.call("keep", "before").get_results()
    group.call("wait_for", str(gate))
    group.call("keep", "after").cancel()
    assert ray.get(told) == [[True] * 3]
    gate.touch()
    assert group.call("get_kept").get_results() == ["before"] * 3


def test_it_survives_pickling(group):
    future = group.call("add", 1)
    again = ray.get(ray.remote(num_cpus=0)(lambda boxed: boxed[0].get_results()).remote([future]))
    assert again == [1, 1, 1]


def test_a_dead_worker_is_told_from_one_that_raises(local_ray, gate):
    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker, name_prefix="mortal") as mortal,
    ):
        with pytest.raises(WorkerFailureError, match=r"rank 1 of 'mortal'.* died during die_on") as caught:
            mortal.call("die_on", [1], gate=str(gate)).get_results()
        gate.touch()
        assert (caught.value.rank, caught.value.pending) == (1, (0,))
        assert isinstance(caught.value.cause, ray.exceptions.ActorDiedError)
        late = "was dead already when add was called: it died during die_on"
        with pytest.raises(WorkerFailureError, match=rf"rank 1 of 'mortal'.* {late}"):
            mortal.on(ranks=[1]).call("add", 1).get_results()
        os.kill(mortal.on(ranks=[0]).call("pid").get_results()[0], signal.SIGKILL)
        eventually(lambda: mortal.get_worker_status()[0] == "dead", "the idle one is told to be dead")
        idle = "was dead already when add was called: it died while it was in no call"
        with pytest.raises(WorkerFailureError, match=rf"rank 0 of 'mortal'.* {idle}"):
            mortal.on(ranks=[0]).call("add", 1).get_results()


@pytest.mark.parametrize(
    ("is_async", "options", "expected"),
    [
        (False, {}, True),
        (True, {}, False),
        (False, {"max_concurrency": 2}, False),
        (False, {"max_concurrency": 1}, True),
        (False, {"allow_out_of_order_execution": True}, False),
    ],
)
def test_which_workers_run_calls_in_order(is_async, options, expected):
    assert runs_in_order(is_async, options) is expected


def test_async_calls_can_be_cancelled(local_ray):
    with RayVirtualCluster([2], use_gpus=False) as cluster, RayWorkerGroup(cluster, AsyncWorker) as sleepers:
        future = sleepers.call("forever")
        future.cancel()
        with pytest.raises(WorkerFailureError):
            future.get_results(timeout=60)
        assert sleepers.call("slowly", 1).get_results() == [1, 1]
