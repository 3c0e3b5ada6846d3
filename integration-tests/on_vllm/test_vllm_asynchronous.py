"""Weights into an asynchronous vLLM, whose core is a process of its own, while it generates."""

import asyncio
import contextlib
import threading

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm_ahead import receiver
from vllm_engines import LONG, Trainer, continued, engine_options, model_of, versions_of

from raycrew.tensor_transport import WeightDirectory
from raycrew.tensor_transport.integrations.vllm import VllmWeights
from raycrew.tensor_transport.transports import SharedMemoryTransport

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

KIND = "separate embeddings"
TOKENS = 150


@pytest.fixture(scope="module")
def loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture(scope="module")
def engine(loop):
    async def start():
        with engine_options(KIND) as options:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**options))

    engine = run(loop, start())
    yield engine
    loop.call_soon_threadsafe(engine.shutdown)


@pytest.mark.parametrize("requests", ["continue", "finish", "abort"])
def test_an_update_while_it_generates(engine, loop, requests):
    with (
        SharedMemoryTransport() as store,
        contextlib.closing(Trainer(KIND, store)) as trainer,
        VllmWeights(engine, loop=loop, store=store, requests=requests) as weights,
    ):
        weights.apply_weights(trainer.publish(1))
        begun = threading.Event()
        answer = asyncio.run_coroutine_threadsafe(generate(engine, requests, begun), loop)
        assert begun.wait(60)
        weights.apply_weights(trainer.publish(2))
        sample = answer.result(120).outputs[0]
    versions = versions_of(sample)
    tokens, old = list(sample.token_ids), model_of(KIND, 1)
    if requests == "continue":
        new, points = model_of(KIND, 2), range(1, TOKENS) if versions is None else [versions["1"]]
        assert versions is None or list(versions) == ["1", "2"]
        assert any(tokens == continued(old, new, LONG, point, TOKENS) for point in points)
        return
    ended = ("abort", True) if requests == "abort" else ("length", False)
    assert versions in ({"1": len(tokens)}, None)
    assert (sample.finish_reason, len(tokens) < TOKENS) == ended
    assert tokens == continued(old, None, LONG, TOKENS, len(tokens))


@pytest.mark.parametrize("requests", ["continue", "finish"])
def test_a_version_that_is_packed_ahead_while_it_generates(engine, loop, requests, loads):
    directory = WeightDirectory.local()
    with (
        SharedMemoryTransport() as store,
        contextlib.closing(Trainer(KIND, store, directory)) as trainer,
        receiver(engine, store, directory, loop=loop, requests=requests) as weights,
    ):
        weights.apply_weights(trainer.publish(1).version)
        begun = threading.Event()
        answer = asyncio.run_coroutine_threadsafe(generate(engine, requests, begun), loop)
        assert begun.wait(60)
        for version in (2, 3):  # the first of them is not applied
            weights.prepare_weights(trainer.publish(version).version)
        weights.apply_weights(3)
        sample = answer.result(120).outputs[0]
        after = asyncio.run_coroutine_threadsafe(generate(engine, "after", begun), loop).result(120)
    tokens, old, new = list(sample.token_ids), model_of(KIND, 1), model_of(KIND, 3)
    points = [TOKENS] if requests == "finish" else range(1, TOKENS)
    if (versions := versions_of(sample)) is not None and requests == "continue":
        points = [versions["1"]]
    assert any(tokens == continued(old, new, LONG, point, TOKENS) for point in points)
    assert list(after.outputs[0].token_ids) == continued(new, None, LONG, TOKENS, TOKENS)
    assert len(loads) == 1


async def generate(engine, name, begun):
    how = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    async for output in engine.generate({"prompt_token_ids": LONG}, how, name):
        if len(output.outputs[0].token_ids) > 3:
            begun.set()
    return output


def run(loop, coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(200)
