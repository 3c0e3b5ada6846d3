"""Samples come back to the queue whatever becomes of those who have them or wait for them."""

import asyncio
import os
import pickle
from types import SimpleNamespace

import pytest

from raycrew.worker_groups.errors import SampleQueueClosedError
from raycrew.worker_groups.samples import SampleQueue
from raycrew.worker_groups.samples._keeper import Keeper
from raycrew.worker_groups.samples._requests import getting, putting


@pytest.fixture
def queue():
    with SampleQueue(["tokens"]) as made:
        yield made


@pytest.fixture
def keeper(queue):
    """Of such a queue, with a clock that stands still."""
    clock = SimpleNamespace(now=0.0)
    made = Keeper(queue._options, lambda: clock.now, lambda tally: None)
    made.clock, made.options = clock, queue._options
    return made


def put(queue, *tokens, version=0):
    return queue.put({"tokens": tokens}, version=version)


def test_a_renewed_lease_that_ends_is_nothing_to_those_who_have_others(keeper):
    def get():
        wanted = getting(keeper.options, 1).arguments["wanted"]
        return wanted.lease, keeper.get(wanted).ids

    keeper.put(**putting(keeper.options, {"tokens": [1, 2]}, 0, None, partial=False).arguments)
    (dies, ids), (lives, _) = get(), get()
    keeper.renew(dies, 700.0)
    keeper.renew(lives, 1000.0)
    keeper.clock.now = 800.0
    assert keeper.done(lives, None) == 1
    assert keeper.stats().returned == 1 and get()[1] == ids


def test_a_coroutine_that_is_cancelled_as_its_samples_come_leaves_no_lease(queue):
    async def cancelled_at(ticks):
        """Cancel somebody who waits, so long after what he waits for has come."""

        async def wait():
            (await asyncio.wait_for(queue.get_async(1), 10)).done()

        waiting = asyncio.create_task(wait())
        for _ in range(4):
            await asyncio.sleep(0)
        put(queue, ticks)
        for _ in range(ticks):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        held = queue.stats().held
        assert held == 0 or queue.get(1, timeout_s=0).done() is None

    for ticks in range(5):
        asyncio.run(cancelled_at(ticks))
    assert (queue.stats().leased, queue.stats().held) == (0, 0)


def test_a_coroutine_that_is_cancelled_as_its_samples_come_ends(queue):
    async def main():
        waiting = asyncio.create_task(queue.get_async(1))
        await asyncio.sleep(0)
        put(queue, 1)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
    assert queue.stats().leased == 0


@pytest.mark.hostile
@pytest.mark.parametrize("options", [{}, {"max_memory": 1, "spill": True}])
def test_a_forked_child_neither_gets_nor_overwrites_samples(options):
    with SampleQueue(["tokens"], **options) as queue:
        put(queue, "first")
        told, tells = os.pipe()
        child = os.fork()
        if not child:
            errors = []
            for use in (lambda: put(queue, "child"), lambda: queue.get(1), queue.stats):
                try:
                    errors.append(use())
                except SampleQueueClosedError as error:
                    errors.append(str(error))
            queue.close()
            os.write(tells, pickle.dumps(errors))
            os._exit(0)
        os.waitpid(child, 0)
        errors = pickle.loads(os.read(told, 10_000))
        assert len(errors) == 3 and all("forked" in error for error in errors)
        put(queue, "second")
        assert queue.get(2)["tokens"] == ["first", "second"]
        for descriptor in (told, tells):
            os.close(descriptor)
