import asyncio
import threading
from types import SimpleNamespace

import pytest

from raycrew.worker_groups import WorkerGroupError
from raycrew.worker_groups._worker import Orders, describe_class, shell_class
from raycrew.worker_groups._worker.hearing import Hearing

pytestmark = pytest.mark.hostile

ORDERS = Orders(SimpleNamespace(generation=1), {})


class Listener:
    def __init__(self):
        self.log, self.gate = [], asyncio.Event()

    async def on_generation(self, worker):
        self.log.append(f"generation {worker.generation}")
        await self.gate.wait()
        self.log.append("heard")

    async def later(self):
        self.log.append("later")

    async def count(self):
        self.log.append("count")
        yield 1

    def now(self):
        self.log.append("now")


@pytest.fixture
def worker(monkeypatch):
    made = shell_class(describe_class(Listener, {}))()
    made._raycrew_instance = Listener()
    monkeypatch.setattr(made, "_raycrew_prepare", lambda orders: None)
    return made


def test_calls_of_an_async_worker_wait_until_it_has_heard_of_its_generation(worker):
    asyncio.run(_hear(worker))
    assert worker._raycrew_instance.log[:2] == ["generation 1", "heard"]
    assert sorted(worker._raycrew_instance.log[2:]) == ["count", "later", "now"]


async def _hear(worker):
    own = worker._raycrew_instance
    hook = asyncio.create_task(worker.on_generation(ORDERS))
    await asyncio.sleep(0)
    calls = [asyncio.create_task(worker.later()), asyncio.create_task(_listed(worker.count()))]
    for _ in range(9):
        await asyncio.sleep(0)
    assert own.log == ["generation 1"]
    with pytest.raises(WorkerGroupError, match="on_generation still runs"):
        worker.now()
    own.gate.set()
    await asyncio.gather(hook, *calls)
    worker.now()


async def _listed(items):
    return [item async for item in items]


def test_calls_in_other_threads_wait_too():
    hearing, order = Hearing(), []

    def call():
        hearing.await_end()
        order.append("call")

    with hearing.under_way():
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        order.append("heard")
    thread.join(60)
    hearing.await_end()
    assert order == ["heard", "call"]


def test_the_end_of_a_late_hearing_lets_no_call_into_the_one_that_follows_it():
    """A generation that a worker was late to hear of is begun again while the class still hears of it."""
    hearing, told = Hearing(), threading.Event()
    first, second = hearing.under_way(), hearing.under_way()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    asyncio.run(_is_waiting(hearing))
    waiting = threading.Thread(target=lambda: (hearing.await_end(), told.set()), daemon=True)
    waiting.start()
    assert not told.wait(0.05)
    second.__exit__(None, None, None)
    assert told.wait(60)
    asyncio.run(hearing.ended())


async def _is_waiting(hearing):
    ended = asyncio.ensure_future(hearing.ended())
    for _ in range(9):
        await asyncio.sleep(0)
    assert not ended.done()
    ended.cancel()
