"""Groups, calls and results in a program of coroutines."""

import asyncio
import gc
import logging
import threading

import pytest
import ray
from patience import eventually
from workers import AsyncWorker, SleepsInInit, Worker

from raycrew.cluster_core import RayVirtualCluster
from raycrew.cluster_core.testing import FakeCluster, connected
from raycrew.worker_groups import (
    RayWorkerGroup,
    ResultTimeoutError,
    WorkerFailureError,
    fan_out_as_completed,
    wait_any,
)
from raycrew.worker_groups._calls.answers.results import Results
from raycrew.worker_groups.testing import InProcessGroup

PATIENCE_S = 60


@pytest.fixture(scope="module")
def cluster(local_ray_session):
    with connected(local_ray_session), RayVirtualCluster([3], use_gpus=False) as made:
        yield made


@pytest.fixture(scope="module", params=["on Ray", "in process"])
def group(request, cluster):
    make = RayWorkerGroup if request.param == "on Ray" else InProcessGroup
    where = cluster if request.param == "on Ray" else FakeCluster([3])
    with make(where, Worker, enable_load_balancing=True, init_timeout_s=PATIENCE_S) as made:
        yield made


@pytest.fixture
def gate(tmp_path):
    """What holds workers back until it is touched, at the latest after the test."""
    made = tmp_path / "gate"
    yield made
    made.touch()


def threads():
    return {thread.name for thread in threading.enumerate()}


def test_asyncio_takes_a_future_wherever_it_takes_a_coroutine(group):
    async def each_way():
        future = group.call("add", 1)
        tasks = [asyncio.create_task(future), asyncio.create_task(future)]
        async with asyncio.TaskGroup() as several:
            tasks += [several.create_task(future), several.create_task(group.call("add", 1))]
        done, _ = await asyncio.wait([asyncio.create_task(future)])
        return [
            *[await task for task in tasks],
            *await asyncio.gather(future, future, group.call("add", 1)),
            await asyncio.wait_for(future, PATIENCE_S),
            await asyncio.shield(future),
            await future,
            done.pop().result(),
        ]

    assert asyncio.run(each_way()) == [[1, 1, 1]] * 11


def test_a_task_that_fails_raises_what_get_results_does_and_leaves_no_noise(group, caplog):
    async def fail():
        tasks = [asyncio.create_task(group.call("fail_on", [1])) for _ in range(2)]
        done, _ = await asyncio.wait(tasks)
        return [task.exception() for task in done]

    with caplog.at_level(logging.WARNING):
        errors = asyncio.run(fail())
        gc.collect()
    assert all(isinstance(error, WorkerFailureError) and error.rank == 1 for error in errors)
    assert not [record for record in caplog.records if "retrieved" in record.getMessage()]


def test_a_cancelled_task_cancels_its_calls_and_a_shielded_one_does_not(group, gate):
    group.call("keep", "before").get_results()
    busy = group.call("wait_for", str(gate))

    kept, lost = group.on(ranks=[0]).call("keep", "shielded"), group.on(ranks=[1]).call("keep", "cancelled")

    async def give_up():
        for waiting in (asyncio.shield(kept), lost):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(waiting, 0.1)
        while "raycrew-cancel" in threads():
            await asyncio.sleep(0.01)
        gate.touch()
        return await busy, await kept

    assert asyncio.run(give_up()) == ([0, 1, 2], [None])
    with pytest.raises(WorkerFailureError, match=r"cancelled|CancelledError"):
        lost.get_results()
    assert group.call("get_kept").get_results() == ["shielded", "before", "before"]


def test_async_methods_that_run_are_cancelled_with_the_task(cluster):
    with RayWorkerGroup(cluster, AsyncWorker) as sleepers:
        future = sleepers.call("forever")

        async def give_up():
            async with asyncio.timeout(0.5):
                await future

        with pytest.raises(TimeoutError):
            asyncio.run(give_up())
        with pytest.raises(WorkerFailureError):
            future.get_results(timeout=PATIENCE_S)


def test_results_come_to_an_async_for_while_the_loop_goes_on(group, gate):
    async def read():
        results = group.run_all_workers_multiple_data("wait_for", [str(gate), None, None]).as_completed()
        first = sorted([await anext(results), await anext(results)])
        ticks = 0
        last = asyncio.create_task(anext(results))
        while not last.done():
            await asyncio.sleep(0.01)
            ticks += 1
            if ticks == 5:
                gate.touch()
        with pytest.raises(StopAsyncIteration):
            await anext(results)
        return first, await last, ticks

    first, last, ticks = asyncio.run(read())
    assert (first, last) == ([(1, 1), (2, 2)], (0, 0))
    assert ticks >= 5


def test_streams_balancers_and_fan_out_are_read_by_async_for(group, local_ray_session, pool):
    async def read():
        return (
            sorted([item async for item in group.stream("count_to", 2)]),
            [item async for item in group.balancer.map("double", range(20))],
            sorted([item async for item in group.balancer.as_completed("double", range(4))]),
            sorted([o.value async for o in fan_out_as_completed(abs, [-1, -2, -3], progress=False)]),
        )

    stream, mapped, completed, fanned = asyncio.run(read())
    assert stream == [(rank, i) for rank in range(3) for i in range(2)]
    assert mapped == [2 * i for i in range(20)]
    assert completed == [(i, 2 * i) for i in range(4)]
    assert fanned == [1, 2, 3]


def test_an_item_that_was_awaited_in_vain_is_the_next_one(group, gate):
    async def read():
        items = group.on(ranks=[0]).call("count_and_wait_for", 1, str(gate)).as_completed()
        taken = []
        while len(taken) < 2:
            try:
                taken.append(await asyncio.wait_for(anext(items), 0.1))
            except TimeoutError:
                gate.touch()
        return taken, [item async for item in items]

    assert asyncio.run(read()) == ([(0, 0), (0, "end")], [])


def test_what_fails_in_an_async_for_is_raised_there(group):
    async def read(results):
        return [item async for item in results]

    with pytest.raises(WorkerFailureError, match="rank 1"):
        asyncio.run(read(group.call("fail_on", [1]).as_completed()))
    with pytest.raises(WorkerFailureError):
        asyncio.run(read(group.balancer.map("double", [1, object()])))


def test_two_tasks_never_get_the_same_item():
    gate = threading.Event()

    def slow():
        yield gate.wait(PATIENCE_S)

    async def read():
        results = Results(slow())
        first = asyncio.create_task(anext(results))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task"):
            await anext(results)
        gate.set()
        return await first

    assert asyncio.run(read())


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_results_that_nobody_wants_any_more_are_given_up(group, gate, how):
    async def read():
        results = group.call("wait_for", str(gate)).as_completed()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(results), 0.1)
        if how == "closed":
            await results.aclose()
            return [item async for item in results]
        return []

    assert asyncio.run(read()) == []
    gate.touch()
    gc.collect()  # tracebacks of errors still had them
    eventually(lambda: "raycrew-results" not in threads(), "its thread ends")


def test_an_abandoned_async_for_gives_its_wait_for_ray_up(cluster, gate):
    with RayWorkerGroup(cluster, Worker) as group:

        async def read():
            async with asyncio.timeout(0.2):
                async for _ in group.call("wait_for", str(gate)).as_completed():
                    pass

        with pytest.raises(TimeoutError):
            asyncio.run(read())
        gc.collect()  # the traceback of the error still had them
        eventually(
            lambda: "raycrew-results" not in {t.name for t in threading.enumerate()}, "its thread ends"
        )
        gate.touch()


def test_whether_calls_have_ended_can_be_asked(group, gate):
    future = group.call("wait_for", str(gate))
    assert not future.done()
    assert not future.wait(timeout=0.1)
    gate.touch()
    assert future.wait(timeout=PATIENCE_S)
    assert future.done()
    failed = group.call("fail_on", [0])
    assert failed.wait()
    stream = group.call("count_to", 2)
    assert stream.wait()
    assert stream.get_results() == [[0, 1]] * 3


def test_the_first_of_several_futures_is_told(group, gate):
    late, early = group.on(ranks=[0]).call("wait_for", str(gate)), group.on(ranks=[1]).call("add", 1)
    assert wait_any([late], timeout=0.1) == []
    assert wait_any([late, early], timeout=PATIENCE_S) == [early]
    gate.touch()
    late.wait()
    assert wait_any([late, early]) == [late, early]
    with pytest.raises(ValueError, match="at least one"):
        wait_any([])


def test_a_function_is_called_once_all_calls_have_ended(group, gate, caplog):
    told, done = [], threading.Event()

    def tell(future):
        told.append((future, future.get_results(return_exceptions=True)))
        done.set()

    future = group.call("wait_for", str(gate))
    future.add_done_callback(tell)
    assert not done.wait(0.1)
    gate.touch()
    assert done.wait(PATIENCE_S)
    assert told == [(future, [0, 1, 2])]
    failed = threading.Event()

    def fail(_):
        failed.set()
        raise ValueError("of the callback")

    group.call("fail_on", [1]).add_done_callback(fail)
    assert failed.wait(PATIENCE_S)
    eventually(lambda: "of the callback" in caplog.text, "it is logged")


def test_failures_can_stand_in_the_place_of_results(group, gate):
    future = group.run_all_workers_multiple_data(
        "fail_on", [[], [1], []], gate=[None, None, str(gate)], timeout=None
    )
    found = []

    def who_is_late():
        found[:] = future.get_results(timeout=0.5, return_exceptions=True)
        return [isinstance(one, ResultTimeoutError) for one in found]

    eventually(lambda: who_is_late() == [False, False, True], "two have answered")
    fine, broken, late = found
    assert fine == "fine"
    assert isinstance(broken, WorkerFailureError)
    assert broken.rank == 1
    assert isinstance(late, ResultTimeoutError)
    assert late.pending == (2,)
    gate.touch()
    (items, error, _) = group.call("count_and_fail_on", [1], 2).get_results(return_exceptions=True)
    assert items == [0, 1]
    assert isinstance(error, WorkerFailureError)


def test_the_one_reference_of_a_rank(cluster):
    with RayWorkerGroup(cluster, Worker) as group:
        several = [group.on(ranks=[rank]).call("add", rank) for rank in range(3)]
        assert ray.get([future.ref for future in several]) == [0, 1, 2]
        with pytest.raises(ValueError, match="3 ObjectRefs, not one"):
            assert group.call("add", 1).ref


@pytest.mark.parametrize("make", [RayWorkerGroup, InProcessGroup])
def test_a_group_is_started_and_ended_by_awaiting(cluster, make):
    where = cluster if make is RayWorkerGroup else FakeCluster([3])

    async def use():
        async with await make.start(where, Worker, base=5) as group:
            found = await group.call("add", 1)
        other = await make.start(where, Worker, name_prefix="other")
        return found, await other.ashutdown(), group, other

    found, ended, group, other = asyncio.run(use())
    assert (found, ended) == ([6, 6, 6], True)
    assert "shut down" in repr(group)
    assert "shut down" in repr(other)


def test_a_start_that_is_cancelled_leaves_no_worker_and_holds_no_bundle(cluster):
    async def start():
        async with asyncio.timeout(3):
            await RayWorkerGroup.start(cluster, SleepsInInit)

    with pytest.raises(TimeoutError):
        asyncio.run(start())
    with RayWorkerGroup(cluster, Worker) as group:
        assert group.call("add", 1).get_results() == [1, 1, 1]
