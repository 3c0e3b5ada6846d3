"""A transfer is a future that ends only when nobody writes any more."""

import asyncio
import math
import threading

import pytest

from raycrew.tensor_transport.errors import TransferCancelledError, TransportError, TransportTimeoutError
from raycrew.tensor_transport.transports import Transfer


def started(work, timeout_s=None):
    transfer = Transfer("a pull", 8, timeout_s=timeout_s)
    thread = threading.Thread(target=transfer.run, args=(work,))
    thread.start()
    return transfer, thread


def until_stopped(guard):
    woken = threading.Event()
    guard.on_stop(woken.set)
    woken.wait(guard.left_s())
    guard.check()


def test_it_ends_well_and_tells_so():
    told = []
    transfer, thread = started(lambda guard: guard.check())
    transfer.add_done_callback(told.append)
    transfer.wait(60)
    thread.join()
    transfer.add_done_callback(told.append)
    assert transfer.done() and transfer.exception() is None and told == [transfer, transfer]
    assert not transfer.cancel()
    with pytest.raises(TransportError, match="ended already"):
        transfer.end()


def test_it_raises_what_the_work_raised_each_time():
    def fail(guard):
        raise TransportError("lost")

    transfer, thread = started(fail)
    thread.join()
    for _ in range(2):
        with pytest.raises(TransportError, match="lost"):
            transfer.wait()


def test_a_wait_that_is_too_short_leaves_it_alone():
    go_on = threading.Event()
    transfer, thread = started(lambda guard: go_on.wait(60))
    with pytest.raises(TransportTimeoutError, match="goes on"):
        transfer.wait(0.001)
    go_on.set()
    transfer.wait(60)
    thread.join()


@pytest.mark.hostile
@pytest.mark.parametrize("endless_s", [math.inf, 2 * threading.TIMEOUT_MAX])
def test_a_time_that_threads_cannot_wait_is_none_at_all(endless_s):
    for own_s, waits_s in ((endless_s, None), (None, endless_s), (endless_s, endless_s)):
        go_on = threading.Event()
        transfer, thread = started(lambda guard, go_on=go_on: go_on.wait(60), own_s)
        threading.Timer(0.01, go_on.set).start()
        transfer.wait(waits_s)
        assert transfer.guard.left_s() is None
        thread.join()


def test_a_wait_tells_its_own_time_beside_a_deadline_that_is_not_heeded():
    transfer = Transfer("a pull", 8, timeout_s=0.01)
    assert transfer.begin()
    with pytest.raises(TransportTimeoutError, match=r"goes on after 0\.125 s"):
        transfer.wait(0.125)
    transfer.end()


def test_a_cancelled_one_ends_when_the_work_heeds_it():
    heeding, go_on = threading.Event(), threading.Event()

    def work(guard):
        heeding.set()
        go_on.wait(60)
        guard.check()

    transfer, thread = started(work)
    heeding.wait(60)
    assert transfer.cancel() and not transfer.done()
    go_on.set()
    with pytest.raises(TransferCancelledError, match="a pull was cancelled"):
        transfer.wait(60)
    thread.join()


def test_one_that_was_cancelled_before_it_began_does_nothing():
    transfer = Transfer("a pull", 8)
    transfer.cancel()
    transfer.run(lambda guard: pytest.fail("it began"))
    with pytest.raises(TransferCancelledError):
        transfer.wait()


def test_its_own_deadline():
    transfer, thread = started(until_stopped, timeout_s=0.01)
    with pytest.raises(TransportTimeoutError, match=r"did not end within 0\.01 s"):
        transfer.wait()
    thread.join()


def test_it_can_be_awaited():
    async def both():
        good, first = started(lambda guard: None)
        await good
        bad, second = started(until_stopped, timeout_s=0.01)
        with pytest.raises(TransportTimeoutError):
            await bad
        for thread in (first, second):
            thread.join()

    asyncio.run(both())


def test_a_cancelled_task_waits_until_nobody_writes():
    go_on = threading.Event()

    def work(guard):
        go_on.wait(60)
        guard.check()

    async def cancelled():
        transfer, thread = started(work)
        waiting = asyncio.ensure_future(transfer._until_ended())
        for _ in range(3):  # It may be cancelled again while it waits for that.
            await asyncio.sleep(0)
            waiting.cancel()
        await asyncio.sleep(0)
        assert not waiting.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert transfer.done()
        thread.join()

    asyncio.run(cancelled())


def test_a_callback_that_fails_is_logged_and_stops_nothing(caplog):
    transfer, told = Transfer("a pull", 8), []
    transfer.add_done_callback(lambda _: 1 / 0)
    transfer.add_done_callback(told.append)
    transfer.run(lambda guard: None)
    assert told == [transfer] and "a callback of a pull failed" in caplog.text
