"""What tasks make of something that can be awaited, and results in `for` and `async for`. No Ray here."""

import asyncio
import threading

import pytest

from raycrew.worker_groups._calls.answers import results
from raycrew.worker_groups._calls.answers.results import Results
from raycrew.worker_groups._calls.answers.tasks import Awaited


class Answer(Awaited):
    """Gives the same answer to all who await it, once it is known."""

    def __init__(self):
        self.known = asyncio.Event()
        self.heard, self.n_given_up = [], 0

    def _give_up(self):
        self.n_given_up += 1

    def __await__(self):
        try:
            yield from self.known.wait().__await__()
        except asyncio.CancelledError as error:
            self.heard.append(error)
            raise
        return 42


def test_each_of_several_tasks_gets_the_answer():
    async def several():
        answer = Answer()
        tasks = [asyncio.create_task(answer) for _ in range(3)]
        await asyncio.sleep(0)
        answer.known.set()
        return [await task for task in tasks], await answer

    assert asyncio.run(several()) == ([42, 42, 42], 42)


def test_a_cancelled_task_is_told_where_it_waits_and_the_others_go_on():
    async def cancel_one():
        answer = Answer()
        lost, kept = asyncio.create_task(answer), asyncio.create_task(answer)
        await asyncio.sleep(0)
        lost.cancel("enough")
        with pytest.raises(asyncio.CancelledError, match="enough"):
            await lost
        answer.known.set()
        return answer.heard, await kept

    heard, value = asyncio.run(cancel_one())
    assert ([str(error) for error in heard], value) == (["enough"], 42)


def test_a_task_that_is_cancelled_before_its_first_step_gives_the_answer_up():
    async def cancel_one():
        answer = Answer()
        lost, kept = asyncio.create_task(answer), asyncio.create_task(answer)
        lost.cancel()
        with pytest.raises(asyncio.CancelledError):
            await lost
        answer.known.set()
        return await kept, answer.n_given_up, answer.heard

    assert asyncio.run(cancel_one()) == (42, 1, [])


def test_what_is_thrown_the_old_way_is_raised_where_the_task_waits():
    async def throw(*what):
        answer = Answer()

        async def walk():
            answer.send(None)
            answer.throw(*what)

        await asyncio.create_task(walk())

    for what in (
        (asyncio.CancelledError("one"),),
        (asyncio.CancelledError, asyncio.CancelledError("one")),
        (asyncio.CancelledError, asyncio.CancelledError("one"), None),
    ):
        with pytest.raises(asyncio.CancelledError, match="one"):
            asyncio.run(throw(*what))


def test_outside_of_a_task_there_is_nobody_who_waits():
    loop, raised = asyncio.new_event_loop(), []

    def send():
        loop.stop()
        try:
            answer.send(None)
        except RuntimeError as error:
            raised.append(str(error))

    try:
        answer = Answer()
        loop.call_soon(send)
        loop.run_forever()
    finally:
        loop.close()
    assert len(raised) == 1
    assert "make a task of it" in raised[0]


def test_results_come_in_order_in_either_loop():
    async def read(results):
        return [result async for result in results]

    assert list(Results(x for x in (1, None, 3))) == [1, None, 3]
    assert asyncio.run(read(Results(x for x in (1, None, 3)))) == [1, None, 3]
    assert asyncio.run(read(Results(x for x in ()))) == []


def test_one_loop_goes_on_where_the_other_stopped():
    results = Results(x for x in (1, 2, 3, 4))

    async def read(count):
        return [await anext(results) for _ in range(count)]

    assert next(results) == 1
    assert asyncio.run(read(2)) == [2, 3]


@pytest.mark.parametrize(("left", "found"), [((1, 2), [1]), ((), [])])
def test_a_result_whose_task_was_cancelled_is_the_for_loops(left, found):
    gate = threading.Event()

    def slow():
        gate.wait(60)
        yield from left

    results = Results(slow())

    async def cancel():
        lost = asyncio.create_task(anext(results))
        await asyncio.sleep(0)
        lost.cancel()
        with pytest.raises(asyncio.CancelledError):
            await lost

    asyncio.run(cancel())
    gate.set()
    assert [result for result, _ in zip(results, range(1), strict=False)] == found


def test_a_result_whose_task_was_cancelled_is_the_next_ones():
    async def cancel_the_first():
        gate = threading.Event()

        def slow():
            gate.wait(60)
            yield 1
            yield 2

        results = Results(slow())
        lost = asyncio.create_task(anext(results))
        await asyncio.sleep(0)
        lost.cancel()
        with pytest.raises(asyncio.CancelledError):
            await lost
        gate.set()
        return [result async for result in results]

    assert asyncio.run(cancel_the_first()) == [1, 2]


def test_an_error_comes_once_and_then_the_end():
    def broken():
        yield 1
        raise ValueError("broken")

    async def read():
        results = Results(broken())
        found = [await anext(results)]
        with pytest.raises(ValueError, match="broken"):
            await anext(results)
        with pytest.raises(StopAsyncIteration):
            await anext(results)
        return found

    assert asyncio.run(read()) == [1]


def test_closing_ends_the_source_and_both_loops():
    ended = []

    def source():
        try:
            yield 1
            yield 2
        finally:
            ended.append(True)

    results = Results(source())
    assert next(results) == 1
    results.close()
    assert (ended, list(results)) == ([True], [])

    async def read():
        other = Results(source())
        assert await anext(other) == 1
        await other.aclose()
        return [result async for result in other]

    assert asyncio.run(read()) == []


def test_one_task_at_a_time_awaits_the_next():
    gate = threading.Event()

    def slow():
        gate.wait(60)
        yield 1

    async def two():
        results = Results(slow())
        first = asyncio.create_task(anext(results))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task awaits"):
            await anext(results)
        gate.set()
        return await first

    assert asyncio.run(two()) == 1


def test_what_waits_for_results_does_not_hold_up_the_end_of_the_program():
    may_end = threading.Event()
    results._start("raycrew-waits", lambda patience: may_end.wait(patience), 60)
    (thread,) = [one for one in threading.enumerate() if one.name == "raycrew-waits"]
    assert thread.daemon
    may_end.set()
    thread.join(60)
