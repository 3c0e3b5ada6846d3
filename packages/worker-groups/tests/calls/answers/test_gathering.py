"""Several threads that wait for one future, and what is left when one of them is cancelled. No Ray here."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from ray.exceptions import RayActorError

from raycrew.cluster_core import Session
from raycrew.worker_groups import MultiWorkerFuture, ResultTimeoutError, WorkerFailureError
from raycrew.worker_groups._calls import Settled, in_thread
from raycrew.worker_groups._calls.answers import gathering, telling
from raycrew.worker_groups._calls.answers.ends import first_failure
from raycrew.worker_groups._calls.answers.recovery import Recovery
from raycrew.worker_groups._calls.answers.results import Results, uninterrupted

PATIENCE_S = 60


class Stream:
    """What a generator method gives, item by item; each is its own reference."""

    def __init__(self, items):
        self.items = iter(items)

    def __next__(self):
        return next(self.items)

    def completed(self):
        return self


class Connection:
    """Gives what a reference stands for, sometimes slowly, sometimes not at all."""

    def __init__(self, slow=(), cancelled=()):
        self.slow, self.cancelled = set(slow), set(cancelled)

    def get(self, ref, timeout=None):
        if ref in self.cancelled:
            self.cancelled.remove(ref)
            raise asyncio.CancelledError
        if ref in self.slow:
            time.sleep(0.2)
        if isinstance(ref, Exception):
            raise ref
        return ref


@pytest.fixture
def connect(monkeypatch):
    def use(connection):
        @contextmanager
        def connected(check):
            yield connection

        monkeypatch.setattr(gathering, "while_connected", connected)
        monkeypatch.setattr(gathering, "await_some", lambda streams, *_: streams[:1])
        monkeypatch.setattr(telling, "check_session", lambda *_: None)

    return use


def streaming(*items):
    return MultiWorkerFuture([Stream(items)], [0], is_stream=True, method="count")


@pytest.mark.hostile
def test_all_threads_that_read_a_stream_get_all_of_it_in_order(connect):
    connect(Connection(slow=[1]))
    future = streaming(1, 2, 3, 4)
    with ThreadPoolExecutor(4) as threads:
        reading = [threads.submit(future.get_results) for _ in range(4)]
        assert [one.result(PATIENCE_S) for one in reading] == [[[1, 2, 3, 4]]] * 4


@pytest.mark.hostile
def test_all_threads_that_read_a_broken_stream_hear_of_it(connect, monkeypatch):
    connect(Connection(slow=[1]))
    monkeypatch.setattr(gathering, "settle", lambda *_: Settled())  # nobody else is left
    future = streaming(1, ValueError("broken"))
    with ThreadPoolExecutor(4) as threads:
        reading = [threads.submit(future.get_results) for _ in range(4)]
        errors = [one.exception(PATIENCE_S) for one in reading]
    assert [type(error) for error in errors] == [WorkerFailureError] * 4


class HalfHung:
    """Rank 0 fails once it is let, and rank 1 gives nothing until all is over."""

    def __init__(self):
        self.may_fail, self.is_hanging, self.is_over = (threading.Event() for _ in range(3))
        self.failing = Stream([ValueError("broken")])
        self.recovery = None

    def await_some(self, streams, *_):
        if self.failing in streams:
            self.may_fail.wait(PATIENCE_S)
            return [self.failing]
        self.is_hanging.set()
        self.is_over.wait(2 * PATIENCE_S)
        return streams[:1]

    def future(self):
        streams, how = [self.failing, Stream([])], {"is_stream": True, "recovery": self.recovery}
        return MultiWorkerFuture(streams, [0, 1], method="count", **how)


@pytest.fixture
def half_hung(connect, monkeypatch):
    connect(Connection())
    made = HalfHung()
    monkeypatch.setattr(gathering, "await_some", made.await_some)
    monkeypatch.setattr(gathering, "settle", lambda *_: Settled())
    yield made
    made.is_over.set()


@pytest.mark.hostile
def test_a_failure_is_told_to_whoever_waited_behind_the_reader_that_heard_of_it(half_hung, monkeypatch):
    is_behind, future = threading.Event(), half_hung.future()
    monkeypatch.setattr(telling, "check_session", lambda *_: is_behind.set())  # now and then
    with ThreadPoolExecutor(2) as threads:
        reading = [threads.submit(future.get_results) for _ in range(2)]
        assert is_behind.wait(PATIENCE_S)
        half_hung.may_fail.set()
        try:
            errors = [one.exception(PATIENCE_S) for one in reading]
        finally:
            half_hung.is_over.set()
    assert [type(error) for error in errors] == [WorkerFailureError] * 2


@pytest.mark.hostile
@pytest.mark.parametrize("error", [ValueError("broken"), RayActorError()])
def test_a_failure_is_told_while_somebody_waits_for_all_outcomes(half_hung, error):
    half_hung.failing, half_hung.recovery = Stream([error]), Recovery(lambda error: False)
    future = half_hung.future()
    half_hung.may_fail.set()
    with ThreadPoolExecutor(2) as threads:
        all_of_them = threads.submit(future.get_results, return_exceptions=True)
        assert half_hung.is_hanging.wait(PATIENCE_S)
        try:
            error = threads.submit(future.get_results).exception(PATIENCE_S)
        finally:
            half_hung.is_over.set()
        outcomes = all_of_them.result(PATIENCE_S)
    assert (type(error), error.pending) == (WorkerFailureError, (1,))
    assert (type(outcomes[0]), outcomes[1]) == (WorkerFailureError, [])


@pytest.mark.hostile
def test_an_item_that_was_asked_for_when_its_reader_was_cancelled_is_not_lost(connect):
    connect(Connection(cancelled=[2]))
    future = streaming(1, 2, 3)
    with pytest.raises(asyncio.CancelledError):
        future.get_results()
    assert future.get_results() == [[1, 2, 3]]


def test_a_reader_that_waits_behind_another_one_keeps_to_its_deadline(connect):
    connect(Connection())
    future = streaming(1)
    with future._turn(), ThreadPoolExecutor(1) as threads, pytest.raises(ResultTimeoutError):
        threads.submit(future.get_results, timeout=0.1).result(PATIENCE_S)
    assert future.get_results() == [[1]]


@pytest.mark.hostile
def test_calls_are_sent_again_once_however_many_wait_for_them(connect, monkeypatch):
    connect(Connection())
    monkeypatch.setattr(gathering, "has_died", lambda error: True)
    sent, waiting = [], threading.Barrier(3)
    died = WorkerFailureError("its worker died")

    def send():
        sent.append(MultiWorkerFuture([len(sent) + 1], [0]))
        return sent[-1]

    future = MultiWorkerFuture([0], [0], recovery=Recovery(lambda error: True, send))

    def gather(deadline):
        if list(future) == [0]:
            waiting.wait(PATIENCE_S)
            raise died
        return {0: future[0]}

    monkeypatch.setattr(future, "_gathered", gather)
    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(lambda _: future.get_results(), range(3)))
    assert results == [[1]] * 3
    assert len(sent) == 1


def test_the_deadline_of_a_call_moves_once_with_a_restart(connect, monkeypatch):
    connect(Connection())
    monkeypatch.setattr(gathering, "has_died", lambda error: True)
    waiting = threading.Barrier(3)

    def restart(error):
        time.sleep(0.2)
        return True

    recovery = Recovery(restart, lambda: MultiWorkerFuture([1], [0]))
    future = MultiWorkerFuture([0], [0], timeout=100, recovery=recovery)
    before = future._deadline

    def gather(deadline):
        if list(future) == [0]:
            waiting.wait(PATIENCE_S)
            raise WorkerFailureError("its worker died")
        return {0: future[0]}

    monkeypatch.setattr(future, "_gathered", gather)
    began = time.monotonic()
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: future.get_results(), range(3)))
    assert before + 0.2 <= future._deadline <= before + time.monotonic() - began


def test_what_was_made_when_its_task_was_cancelled_at_the_last_moment_is_undone():
    made, undone = threading.Event(), []

    async def cancel_late():
        task = asyncio.create_task(in_thread(lambda: made.set() or "group", undone.append))
        await asyncio.sleep(0)
        made.wait(PATIENCE_S)
        time.sleep(0.1)  # the thread has ended, and the loop has not heard of it
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_late())
    assert undone == ["group"]


def test_what_is_still_being_made_when_its_task_is_cancelled_is_undone_before_that_is_told():
    go_on, undone = threading.Event(), []

    def make():
        go_on.wait(PATIENCE_S)
        return "group"

    async def cancel():
        task = asyncio.create_task(in_thread(make, undone.append))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert undone == ["group"]

    asyncio.run(cancel())


def test_what_fails_when_its_task_is_cancelled_leaves_nothing_to_undo():
    failed, undone = threading.Event(), []

    def fail():
        failed.set()
        raise ValueError("no group")

    async def cancel_late():
        task = asyncio.create_task(in_thread(fail, undone.append))
        await asyncio.sleep(0)
        failed.wait(PATIENCE_S)
        time.sleep(0.1)  # the thread has ended, and the loop has not heard of it
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ValueError, match="no group"):
            await in_thread(fail, undone.append)
        return await in_thread(lambda: "group", undone.append)

    assert asyncio.run(cancel_late()) == "group"
    assert undone == []


def test_a_clean_up_goes_on_to_its_end_though_its_task_is_cancelled():
    go_on, done = threading.Event(), []

    def clean_up():
        go_on.wait(PATIENCE_S)
        done.append("cleaned up")
        return "left"

    async def cancel():
        task = asyncio.create_task(uninterrupted(clean_up))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done == ["cleaned up"]
        with pytest.raises(ZeroDivisionError):
            await uninterrupted(lambda: 1 // 0)
        return await uninterrupted(clean_up)

    assert asyncio.run(cancel()) == "left"


def test_results_end_for_a_loop_that_awaits_after_one_that_blocks_took_the_last():
    go_on = threading.Event()

    def slow():
        go_on.wait(PATIENCE_S)
        yield 1

    async def read():
        results = Results(slow())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(results), 0.05)
        go_on.set()
        assert next(results) == 1
        with pytest.raises(StopAsyncIteration):
            await anext(results)
        with pytest.raises(StopAsyncIteration):
            await anext(results)

    asyncio.run(asyncio.wait_for(read(), PATIENCE_S))


def test_a_future_without_calls_has_no_results():
    assert asyncio.run(asyncio.wait_for(first_failure([], None, lambda: None), PATIENCE_S)) is False


def test_a_clean_up_is_not_given_up_with_what_it_cleans_up():
    given_up = threading.Event()
    with Session.until_set(given_up):
        given_up.set()
        with Session.until_set(None):
            Session.check_wanted()
        with pytest.raises(asyncio.CancelledError):
            Session.check_wanted()
    Session.check_wanted()
