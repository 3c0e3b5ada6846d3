"""Prompts are pulled one at a time, when they are asked for, and each has an id of its own."""

import asyncio
import pickle
import threading

import pytest
from patience import eventually

from raycrew.worker_groups.balancing import LATER
from raycrew.worker_groups.rollouts import PromptError
from raycrew.worker_groups.rollouts._engine.prompts import END, Prompts, check_prompts


def prompts_of(source, ids=None):
    return Prompts(source, ids, lambda: None)


def next_of(prompts):
    """The next one, however long it takes."""
    found = []

    def is_there():
        found[:] = [prompts.next()]
        return found[0] is not LATER

    eventually(is_there, "the next prompt")
    return found[0]


def all_of(prompts):
    found = []
    while (prompt := next_of(prompts)) is not END:
        found.append((prompt.id, pickle.loads(prompt.data)))
    prompts.close()
    return found


def test_ids_are_positions_or_given():
    assert all_of(prompts_of([])) == []
    assert all_of(prompts_of(iter("ab"))) == [("0", "a"), ("1", "b")]
    given = [{"n": 5}, {"n": 7}]
    assert all_of(prompts_of(given, lambda prompt: prompt["n"])) == [("5", given[0]), ("7", given[1])]


def test_an_id_may_be_a_number_of_numpy():
    numpy = pytest.importorskip("numpy")
    assert all_of(prompts_of([7], numpy.int64)) == [("7", 7)]


@pytest.mark.parametrize(
    ("source", "ids", "message"),
    [
        ("aba", str, "the prompt at 2 has the id 'a' of an earlier one"),
        ([1, 2, None], lambda prompt: prompt, "is a string or a whole number, not None"),
        ([1, 2, True], lambda prompt: prompt, "not True"),
        ([1, 2, 2.5], lambda prompt: prompt, "not 2.5"),
        (["a", "b", ""], str, "not ''"),
        ([1, 2, "x"], lambda prompt: prompt + 1, "TypeError"),
        ([1, 2, threading.Lock()], None, "can't pickle|cannot pickle"),
    ],
)
def test_a_prompt_that_can_not_be_used_ends_the_stream(source, ids, message):
    prompts = prompts_of(list(source), ids)
    assert len(all_of(prompts)) == 2
    with pytest.raises(PromptError, match=message):
        raise prompts.error
    assert prompts.next() is END


def test_a_stream_that_raises_ends_there():
    def broken():
        yield 1
        raise KeyError("the disk")

    prompts = prompts_of(broken())
    assert all_of(prompts) == [("0", 1)]
    assert isinstance(prompts.error.__cause__, KeyError) and "failed after 1" in str(prompts.error)


def test_nothing_is_pulled_that_was_not_asked_for_and_a_slow_stream_holds_nobody_up():
    pulled, go_on = [], threading.Event()

    def slow():
        for i in range(3):
            pulled.append(i)
            yield i
            go_on.wait(60)

    prompts = prompts_of(slow())
    assert pulled == []
    assert next_of(prompts).id == "0" and pulled == [0]
    assert prompts.next() is LATER and prompts.next() is LATER
    go_on.set()
    assert next_of(prompts).id == "1" and pulled == [0, 1]


async def counted(n):
    for i in range(n):
        await asyncio.sleep(0)
        yield i


def test_an_async_stream_is_read_in_a_thread_of_its_own():
    assert all_of(prompts_of(counted(3))) == [("0", 0), ("1", 1), ("2", 2)]


def test_or_in_the_loop_that_there_is():
    async def main():
        arriving = asyncio.Queue()  # of this loop

        async def stream():
            while (prompt := await arriving.get()) is not None:
                yield prompt

        prompts = prompts_of(stream())
        taking = asyncio.create_task(asyncio.to_thread(all_of, prompts))
        for prompt in ("a", "b", None):
            await arriving.put(prompt)
        assert await taking == [("0", "a"), ("1", "b")]
        given_up = prompts_of(stream())
        assert await asyncio.to_thread(given_up.next) is LATER
        given_up.close()

    asyncio.run(main())


@pytest.mark.parametrize("prompts", ["a text", b"bytes", 7, None])
def test_what_is_no_stream_is_refused(prompts):
    with pytest.raises(TypeError, match="iterable"):
        check_prompts(prompts, None)


def test_ids_that_are_no_function_are_refused():
    with pytest.raises(TypeError, match="a function of a prompt"):
        check_prompts([], "id")
