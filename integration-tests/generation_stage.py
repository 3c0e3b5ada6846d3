"""A generation group with a trainer of its own, and what its model says about tokens: for tests."""

import asyncio
import os
import queue
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from raycrew.cluster_core import RayVirtualCluster
from raycrew.tensor_transport import (
    BatchedDataDict,
    RouteStore,
    WeightDirectory,
    WeightPublisher,
    digest_weights,
    sync_weights,
)
from raycrew.tensor_transport.integrations.vllm import greedy_references
from raycrew.tensor_transport.testing import LocalPeers
from raycrew.worker_groups import WorkerFailureError

EXAMPLE = Path(__file__).parent.parent / "examples" / "generation"
sys.path.insert(0, str(EXAMPLE))

from generation import EngineOptions, start_generators  # noqa: E402

TIMEOUT_S = 120.0
END = 1
BUCKET_BYTES = 64 << 10  # several to a version
# Weights large enough for each version to say something else.
MODEL = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": END,
}
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14], [15]]


class Trainer:
    """Publishes a model with weights of its own for each version, and keeps all of them."""

    device = "cpu"  # what it publishes is there

    def __init__(self, directory, store=None):
        self.store, self.models = store, {}
        self.publisher = WeightPublisher(directory=directory, store=store, bucket_bytes=BUCKET_BYTES)

    def join_route(self, told):
        return self.store.join(told)

    def model(self, version):
        if version not in self.models:
            torch.manual_seed(version)
            config = AutoConfig.for_model(**MODEL)
            self.models[version] = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        return self.models[version]

    def publish_weights(self):
        version = max(self.models, default=0) + 1
        weights = self.model(version).state_dict()
        update = self.publisher.publish({name: value.to(self.device) for name, value in weights.items()})
        assert update.version == version
        return update


class Stage(ABC):
    """A generator, and a trainer in this process that updates it."""

    def __init__(self, directory, model):
        self.directory, self.model = directory, model
        self.trainer = LocalPeers([self.model])
        self.route = None  # over which versions come

    @property
    def version(self):
        return self.directory.latest

    def sync(self, **options):
        options |= {"prepare": "prepare_weights", "timeout_s": TIMEOUT_S, "directory": self.directory}
        return sync_weights(self.trainer, self.peers, route=self.route, **options).version

    def generate(self, *args, **call):
        return self.begin(*args, **call).result(TIMEOUT_S)

    @abstractmethod
    def begin(self, batch, sampling=None, **call):
        """A future of `generate`."""

    @abstractmethod
    def call(self, method, *args, **options):
        """The result of another method."""

    @abstractmethod
    def stream(self, batch, sampling):
        """What `generate_async` yields, as it comes."""

    @abstractmethod
    def refused(self, kind, match):
        """A context in which the generator raises such an error."""

    def metrics(self):
        return self.call("metrics")

    def check(self, **options):
        """What the generator says of the trainer's latest version."""
        digest = digest_weights(self.model.model(self.version).state_dict())
        return self.call("check", self.references(), digest=digest, **options)

    def references(self, version=None):
        """What a plain forward pass goes on with, by default that of the latest version."""
        model = self.model.model(version or self.version)
        return greedy_references(lambda ids: model(ids).logits, PROMPTS)

    def wait_for(self, condition):
        """Until what the generator tells of itself is so."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition(found := self.metrics()):
            assert time.monotonic() < deadline, found
            time.sleep(0.002)
        return found

    def wait_for_tokens(self, count, future=None):
        """Until so many more tokens were generated, or the call has ended that was to generate them."""
        before = self.metrics().tokens
        self.wait_for(lambda found: found.tokens >= before + count or (future and future.done()))

    def plain_logprobs(self, prompt, tokens, version):
        """Log-probability of each token in a plain forward pass with a version's weights."""
        at = torch.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1)
        return self._logits([*prompt, *tokens], version).log_softmax(-1)[at, torch.tensor(tokens)].tolist()

    def likeliest(self, tokens, version):
        """The token that a plain forward pass has as the next one."""
        return int(self._logits(tokens, version)[-1].argmax())

    def _logits(self, tokens, version):
        with torch.no_grad():
            return self.model.model(version)(torch.tensor([tokens])).logits[0]


class LocalStage(Stage):
    """A worker that is an object of this process, on an event loop in a thread."""

    def __init__(self, worker, directory, model, loop):
        super().__init__(directory, model)
        self.worker, self.loop = worker, loop
        self.peers = LocalPeers([self])

    def begin(self, batch, sampling=None, **call):
        return asyncio.run_coroutine_threadsafe(self.worker.generate(batch, sampling, **call), self.loop)

    def call(self, method, *args, **options):
        coroutine = getattr(self.worker, method)(*args, **options)
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(TIMEOUT_S)

    def stream(self, batch, sampling):
        come = queue.SimpleQueue()

        async def listen():
            try:
                async for item in self.worker.generate_async(batch, sampling):
                    come.put(item)
            finally:
                come.put(None)

        listening = asyncio.run_coroutine_threadsafe(listen(), self.loop)
        yield from iter(lambda: come.get(timeout=TIMEOUT_S), None)
        listening.result(TIMEOUT_S)

    def refused(self, kind, match):
        return pytest.raises(kind, match=match)

    def prepare_weights(self, version):
        return self.call("prepare_weights", version)

    def apply_weights(self, version):
        return self.call("apply_weights", version)

    def join_route(self, told):
        return self.call("join_route", told)


class GroupStage(Stage):
    """A group on Ray; the first replica is asked where one is meant."""

    def __init__(self, generators, directory, model):
        super().__init__(directory, model)
        self.generators = generators
        self.group = self.peers = generators.group

    @property
    def first(self):
        return self.group.on(ranks=[self.generators.leaders[0]], timeout=TIMEOUT_S)

    def sync(self):
        return super().sync(recipients=self.generators.leaders)

    def begin(self, batch, sampling=None, **call):
        return First(self.first.call("generate", batch, sampling, **call))

    def call(self, method, *args, **options):
        return self.first.call(method, *args, **options).get_results()[0]

    def stream(self, batch, sampling):
        return (item for _, item in self.first.stream("generate_async", batch, sampling))

    @contextmanager
    def refused(self, kind, match):
        with pytest.raises(WorkerFailureError, match=match) as failure:
            yield
        assert isinstance(failure.value.__cause__, kind)


class First:
    """The future of one rank's result."""

    def __init__(self, future):
        self.future = future
        self.cancel, self.done = future.cancel, future.done

    def result(self, timeout):
        return self.future.get_results(timeout=timeout)[0]


class Shelf(dict):
    """Where a trainer and a generator of one process have the bytes of weights."""

    def put(self, data):
        self[key := len(self)] = data.copy()
        return key

    def get(self, ticket, timeout_s=None):
        return self[ticket]

    def release(self, ticket):
        self[ticket] = None


def batch_of(prompts=PROMPTS):
    return BatchedDataDict({"prompt_ids": prompts})


def rows_of(batch):
    """Prompt, sample, ids, log-probabilities, versions and reason of each row, as lists."""
    columns = ("output_ids", "logprobs", "weight_versions")
    ragged = zip(*([row.tolist() for row in batch[name]] for name in columns), strict=True)
    heads = zip(batch["prompt_index"].tolist(), batch["sample_index"].tolist(), strict=True)
    return [(*head, *row, why) for head, row, why in zip(heads, ragged, batch["finish_reason"], strict=True)]


@contextmanager
def local_stage(worker, model=MODEL, trainer=Trainer, worker_options=None, stores=None, **options):
    """A stage with a worker of this process; `stores` are the trainer's and the worker's."""
    loop, shelf = asyncio.new_event_loop(), Shelf()
    of_trainer, of_worker = stores or (shelf, shelf)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    directory = WeightDirectory.local()
    try:
        made = worker(EngineOptions(model, **options), directory, of_worker, **(worker_options or {}))
    except BaseException:
        loop.call_soon_threadsafe(loop.stop)
        raise
    made = LocalStage(made, directory, trainer(directory, of_trainer), loop)
    try:
        made.sync()
        yield made
    finally:
        try:
            made.call("sleep", "abort")
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


@contextmanager
def group_stage(
    worker,
    bundles=1,
    model=MODEL,
    trainer=Trainer,
    synced=True,
    options=None,
    worker_options=None,
    use_gpus=False,
    routed=False,
    **group,
):
    """A stage with generators on Ray, whose versions may be `routed`."""
    worker_options = {**({"store": RouteStore} if routed else {}), **(worker_options or {})}
    with (
        RouteStore() if routed else nullcontext() as store,
        WeightDirectory.start() as directory,
        RayVirtualCluster([bundles], use_gpus=use_gpus) as cluster,
        start_generators(
            cluster,
            worker,
            EngineOptions(model, **(options or {})),
            worker_options={"directory": directory, **worker_options},
            **group,
        ) as generators,
    ):
        made = GroupStage(generators, directory, trainer(directory, store))
        if synced:
            made.sync()
        yield made


def survive(stage, pid, batch, sampling):
    """Rows of a batch during which a replica is killed once it is at work."""

    def kill():
        stage.wait_for_tokens(8)
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    parts = list(stage.generators.stream(batch, sampling))
    killer.join()
    return [row for part in parts for row in rows_of(part)]
