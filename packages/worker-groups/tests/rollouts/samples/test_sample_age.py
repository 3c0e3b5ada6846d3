"""How old samples are for those who ask for young ones: nobody gets what is older than they said."""

import asyncio
import pickle
from contextlib import suppress
from types import SimpleNamespace

import pytest

from raycrew.worker_groups.errors import SampleQueueTimeoutError
from raycrew.worker_groups.rollouts.samples import SampleQueue
from raycrew.worker_groups.rollouts.samples._asking.requests import Request


def rescoring(*rescored, columns=("tokens", "logprobs", "values", "reward")):
    return SampleQueue(columns, stale="rescore", rescored=rescored)


def find_too_old(queue, **wanted):
    with pytest.raises(SampleQueueTimeoutError):
        queue.get(1, timeout_s=0, **wanted)


@pytest.mark.parametrize("versions", [(1, 5), (5, 1)])
def test_what_is_scored_anew_in_two_steps_is_as_old_as_the_older_one(tmp_path, versions):
    columns = ["tokens", "logprobs", "values"]
    options = {"stale": "rescore", "rescored": columns[1:], "directory": tmp_path}
    with SampleQueue(columns, **options) as queue:
        ids = queue.put({name: [name] for name in columns}, version=0)
        queue.advance(5)
        find_too_old(queue, max_staleness=0)
        queue.add(ids, {"logprobs": [1]}, version=versions[0])
    with SampleQueue(columns, **options) as queue:
        queue.add(ids, {"values": [2]}, version=versions[1])
        assert queue.get(1, max_staleness=4).versions_behind == [4]
    with SampleQueue(columns, **options) as queue:
        find_too_old(queue, max_staleness=0)
        queue.add(ids, {"logprobs": [3], "values": [4]}, version=5)
        batch = queue.get(1, max_staleness=0)
        assert (batch["logprobs"], batch["values"], batch.versions_behind) == ([3], [4], [0])


def test_what_is_taken_off_to_be_scored_anew_takes_no_memory():
    with rescoring("logprobs", columns=("tokens", "logprobs")) as queue:
        queue.put({"tokens": [0], "logprobs": [bytes(50_000)]}, version=0)
        assert queue.stats().in_memory_bytes > 50_000
        queue.advance(5)
        find_too_old(queue, max_staleness=1)
        assert queue.stats().in_memory_bytes < 1000


def test_no_column_is_taken_from_samples_to_which_somebody_adds():
    with rescoring("logprobs", "values") as queue:
        queue.put({"tokens": [0], "logprobs": ["of 0"]}, version=0)
        queue.advance(5)
        adder = queue.get(1, columns=["logprobs"], adds=["values"])
        other = {"columns": ["logprobs"], "adds": ["reward"], "max_staleness": 1}
        find_too_old(queue, **other)
        assert adder.add({"values": [f"from {adder['logprobs'][0]}"]}, version=0) == []
        find_too_old(queue, **other)
        with queue.get(1, adds=["logprobs", "values"], timeout_s=0) as batch:
            assert list(batch) == ["tokens"]
            batch.add({"logprobs": ["of 5"], "values": ["from of 5"]}, version=5)
        assert queue.get(1, **other).versions_behind == [0]


def test_whoever_holds_the_weights_is_asked_for_their_version_while_a_get_waits():
    receiver = SimpleNamespace(version=0)

    async def main():
        wanted = queue.get_async(1, max_staleness=0, version=receiver, timeout_s=60)
        waiting = asyncio.create_task(wanted)
        await asyncio.sleep(0)
        receiver.version = 5
        for tokens, version in (("old", 0), ("young", 5)):
            queue.put({"tokens": [tokens]}, version=version)
            for _ in range(5):
                await asyncio.sleep(0)
        return await waiting

    with SampleQueue(["tokens"]) as queue:
        assert asyncio.run(main())["tokens"] == ["young"]


def test_a_request_that_is_passed_on_takes_the_version_of_that_moment_along():
    receiver = SimpleNamespace(version=0)
    with SampleQueue(["tokens"]) as queue:
        passed = []
        queue._channel.ask = lambda request, timeout_s: passed.append(request) or 1 / 0
        with suppress(ZeroDivisionError):
            queue.get(1, version=receiver)
    receiver.version = 7
    (request,) = passed
    copy = pickle.loads(pickle.dumps(request))
    assert isinstance(copy, Request) and copy.holder is None
    assert copy.arguments["wanted"].version == 7


def test_a_prompt_without_tokens_is_of_those_who_make_its_first():
    with SampleQueue(["tokens"], stale="drop") as queue:
        queue.put({"tokens": [[]]}, version=3, lengths=[0], partial=True)
        queue.advance(10)
        with queue.resume(1) as parts:
            parts.put({"tokens": [[1]]}, version=10, lengths=[1])
        batch = queue.get(1, max_staleness=1, timeout_s=0)
        assert batch.versions_behind == [0] and batch.token_versions(0) == [10]


class Number:
    """A number as a tensor is one: not equal to an int in a dict."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


def test_numbers_of_numpy_and_torch_are_numbers(tmp_path):
    np = pytest.importorskip("numpy")
    with SampleQueue(["tokens", "reward", "values"], directory=tmp_path) as queue:
        ids = queue.put({"tokens": [1, 2]}, version=np.int64(3), lengths=np.array([4, 0]))
        assert queue.add([*map(Number, ids)], {"reward": [1, 2]}) == []
        assert queue.add(np.array(ids), {"values": [1, 2]}, version=Number(3)) == []
        batch = queue.get(2, timeout_s=0)
        batch.done([Number(ids[0])])
        assert list(batch._open) == ids[1:]
        assert batch.token_versions(0) == [3, 3, 3, 3]
        for wrong in (True, 1.5, "1", np.array([1, 2])):
            with pytest.raises(TypeError):
                queue.put({"tokens": [1]}, version=wrong)
        with pytest.raises(ValueError, match="twice"):
            batch.done([ids[1], ids[1]])
    with SampleQueue(["tokens", "reward", "values"], directory=tmp_path) as queue:
        assert queue.get(1).ids == ids[1:]


def test_counts_are_of_any_kind_of_whole_numbers():
    with SampleQueue(["tokens"]) as queue:
        queue.put({"tokens": [1, 2, 3]}, version=0)
        with queue.get(Number(3), at_least=Number(2), max_staleness=Number(0), timeout_s=0) as batch:
            assert batch.size == 3
        assert queue.discard(Number(1)) == 0
        for wrong in (2.0, True, None, "2"):
            with pytest.raises(TypeError, match="batch is a whole number"):
                queue.get(wrong)
        with pytest.raises(ValueError, match="at_least is at least 1, got 0"):
            queue.get(1, at_least=Number(0))


def test_columns_may_be_named_by_whatever_can_be_gone_through():
    with SampleQueue(["tokens", "reward"]) as queue:
        queue.put({"tokens": [1]}, version=0)
        find_too_old(queue, columns=iter(["tokens", "reward"]))
        with queue.get(1, columns=iter(["tokens"]), adds=iter(["reward"])) as batch:
            batch.add({"reward": [0.5]})
        assert dict(queue.get(1, columns=iter(["tokens", "reward"]))) == {"tokens": [1], "reward": [0.5]}
