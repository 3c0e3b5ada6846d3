"""Pulls that wait for a thread heed deadlines, cancellation and the end of their transport all the same."""

import asyncio
import os
import threading

import pytest
import torch

from raycrew.tensor_transport.errors import (
    TransferCancelledError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
)
from raycrew.tensor_transport.transports import SharedMemoryTransport, Transfer
from raycrew.tensor_transport.transports import _pulling as base


class Stuck(SharedMemoryTransport):
    """Pulls of more than a word go on until they are stopped."""

    def _move(self, jobs, guard):
        if jobs[0].target.nbytes > 8:
            stopped = threading.Event()
            guard.on_stop(stopped.set)
            stopped.wait(60)
        guard.check()
        super()._move(jobs, guard)


@pytest.fixture
def busy():
    """A transport all of whose threads wait for somebody."""
    with Stuck() as transport:
        large, small = (transport.offer(torch.arange(n)) for n in (2, 1))
        into = torch.zeros(2, dtype=torch.int64)
        stuck = [transport.pull([large.whole], [into]) for _ in range(base._THREADS)]
        yield transport, small, stuck


@pytest.mark.hostile
def test_a_deadline_of_a_pull_that_waits_for_a_thread(busy):
    transport, small, stuck = busy
    into = torch.full((1,), 7)
    for wait_s in (None, 30):
        with pytest.raises(TransportTimeoutError, match=r"within 0\.01 s"):
            transport.pull([small.whole], [into], timeout_s=0.01).wait(wait_s)

    async def awaited():
        with pytest.raises(TransportTimeoutError, match=r"within 0\.01 s"):
            await transport.pull([small.whole], [into], timeout_s=0.01)

    asyncio.run(asyncio.wait_for(awaited(), 30))
    patient = transport.pull([small.whole], [into], timeout_s=60)
    for transfer in stuck:
        transfer.cancel()
    patient.wait(30)
    assert into.tolist() == [0], "small holds a zero"


@pytest.mark.hostile
def test_a_pull_that_waits_for_a_thread_is_cancelled_at_once_and_writes_nothing(busy):
    transport, small, stuck = busy
    into = torch.full((1,), 7)
    waiting = transport.pull([small.whole], [into])
    assert waiting.cancel() and waiting.done() and not waiting.cancel()
    with pytest.raises(TransferCancelledError):
        waiting.wait()
    for transfer in stuck:
        transfer.cancel()
        transfer.exception(30)
    transport.pull([small.whole], [torch.zeros(1, dtype=torch.int64)]).wait(30)
    assert into.tolist() == [7]


@pytest.mark.hostile
def test_closing_ends_what_waits_for_a_thread(busy, monkeypatch):
    transport, small, stuck = busy
    waiting, stop = transport.pull([small.whole], [torch.zeros(1, dtype=torch.int64)]), Transfer.stop

    def stop_last(transfer, *why):
        if transfer is waiting:  # and its turn is there as others have ended
            for other in stuck:
                stop(other, *why)
                other.exception(30)
        stop(transfer, *why)

    monkeypatch.setattr(Transfer, "stop", stop_last)
    transport.close()
    for transfer in (waiting, *stuck):
        with pytest.raises(TransportClosedError):
            transfer.wait(0)


@pytest.mark.hostile
def test_a_pull_that_gets_no_thread_is_refused_and_never_writes(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    with SharedMemoryTransport() as transport:
        offer, into = transport.offer(torch.arange(3)), torch.full((3,), 7)
        with monkeypatch.context() as patch, pytest.raises(TransportError, match="can't start new thread"):
            patch.setattr(threading.Thread, "start", refuse)
            transport.pull([offer.whole], [into])
        other = torch.zeros(3, dtype=torch.int64)
        transport.pull([offer.whole], [other]).wait(60)
        transport.pull([offer.whole], [other]).wait(60)
        assert into.tolist() == [7] * 3 and other.tolist() == [0, 1, 2]


@pytest.mark.hostile
def test_a_forked_child_does_not_wait_for_its_parents_pulls(busy):
    transport, small, stuck = busy
    child = os.fork()
    if child == 0:
        code = 1
        try:
            error = stuck[0].exception(5)
            into = torch.full((1,), 7)
            transport.pull([small.whole], [into]).wait(30)
            code = 0 if "from which this one was forked" in str(error) and into.item() == 0 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not stuck[0].done()
