"""Weights into a vLLM of two workers that are processes of their own, each of which holds shards."""

import contextlib
import gc
import multiprocessing

import psutil
import pytest
import torch
from vllm_ahead import check, fail_in_worker, receiver
from vllm_engines import Trainer, greedy, model_of, references, start, versions_of, weights_of

from raycrew.tensor_transport import StaleWeightsError, WeightDirectory, WeightPublisher, WeightUpdateError
from raycrew.tensor_transport.integrations.vllm import VllmWeights
from raycrew.tensor_transport.transports import SharedMemoryTransport

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

KIND = "tied embeddings, biases"


@pytest.fixture(scope="module")
def engine():
    llm = start(KIND, tensor_parallel_size=2, distributed_executor_backend="mp")
    llm.kind = KIND
    yield llm
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()


@pytest.fixture
def store():
    with SharedMemoryTransport() as transport:
        yield transport


@pytest.fixture
def trainer(store):
    with contextlib.closing(Trainer(KIND, store)) as trainer:
        yield trainer


def test_shards_are_those_of_the_trainers_tensors(engine, trainer, store):
    with VllmWeights(engine, store=store) as weights:
        for seed in (1, 2):
            weights.apply_weights(trainer.publish(seed))
            weights.check(references(trainer.model))


@pytest.mark.parametrize("ahead", [False, True])
def test_200_updates_take_no_memory_of_the_engines_processes(engine, store, ahead):
    directory = WeightDirectory.local()
    with (
        contextlib.closing(Trainer(KIND, store, directory)) as trainer,
        receiver(engine, store, directory) as weights,
    ):
        trainer.publish(3)
        model_bytes, seen = sum(tensor.nbytes for tensor in weights_of(trainer.model).values()), []
        for number in range(220):
            version = trainer.publisher.publish(weights_of(trainer.model)).version
            if ahead:
                weights.prepare_weights(version)
            weights.apply_weights(version)
            if not 20 < number < 200:
                seen.append([held_by(process) for process in processes()])
        weights.check(references(trainer.model))
    for of_one in zip(*seen, strict=True):
        before, after = (map(max, zip(*some, strict=True)) for some in (of_one[:21], of_one[21:]))
        for most, now, spare in zip(before, after, (20 * model_bytes, 2 * model_bytes, 2), strict=True):
            assert now <= most + spare


def processes():
    """Those of the engine that hold shards."""
    found = {child.name: child.pid for child in multiprocessing.active_children()}
    return [psutil.Process(found[f"VllmWorker-{rank}"]) for rank in range(2)]


def held_by(process):
    """Bytes of its own memory, bytes of mapped files in shared memory, and descriptors."""
    maps = process.memory_maps()
    own = sum(found.anonymous for found in maps)
    return own, sum(found.size for found in maps if "/dev/shm" in found.path), process.num_fds()


def test_versions_are_packed_ahead_and_a_worker_that_fails_of_that_makes_no_difference(engine, store, loads):
    directory = WeightDirectory.local()
    with (
        contextlib.closing(Trainer(KIND, store, directory)) as trainer,
        receiver(engine, store, directory) as weights,
    ):

        def check_update(seed):
            weights.prepare_weights(trainer.publish(seed).version)
            check(engine, weights, weights.version)
            weights.apply_weights(seed)
            check(engine, weights, seed)

        weights.apply_weights(trainer.publish(1).version)
        check_update(2)
        check_update(3)
        assert len(loads) == 1
        for rank, what in ((0, "run"), (1, "pack")):
            engine.collective_rpc(fail_in_worker, args=(rank, what))
            check_update(weights.version + 1)
            check_update(weights.version + 1)
        assert len(loads) == 3
        engine.collective_rpc(fail_in_worker, args=(1, "exchange"))
        weights.prepare_weights(trainer.publish(8).version)
        with pytest.raises(WeightUpdateError, match="1 of 2 workers") as caught:
            weights.apply_weights(8)
        assert caught.value.intact
        check(engine, weights, 7)
        check_update(9)


def test_a_first_version_that_lacks_tensors_is_not_served_and_the_engine_can_go_on(engine, store):
    parts = {k: v for k, v in weights_of(model_of(KIND, 3)).items() if "up_proj" not in k}
    with VllmWeights(engine, store=store) as weights, contextlib.closing(WeightPublisher(store)) as publisher:
        with pytest.raises(WeightUpdateError, match="2 of 2 workers"):
            weights.apply_weights(publisher.publish(parts))
        with pytest.raises(StaleWeightsError, match="mixture"):
            weights.require()
        weights.apply_weights(publisher.publish(weights_of(model_of(KIND, 4))))
        weights.check(references(model_of(KIND, 4)))


def test_workers_that_fail_half_way_get_the_version_before(engine, trainer, store, monkeypatch):
    with VllmWeights(engine, store=store, requests="finish") as weights:
        weights.apply_weights(trainer.publish(5))
        good, stage = references(trainer.model), weights._loader._stage
        lend = stage.lend

        def spoilt(tensors):
            monkeypatch.undo()
            cut = len(tensors) // 2
            return lend([*tensors[:cut], ("no.such.weight", torch.zeros(3)), *tensors[cut:]])

        monkeypatch.setattr(stage, "lend", spoilt)
        with pytest.raises(WeightUpdateError, match="2 of 2 workers") as caught:
            weights.apply_weights(trainer.publish(6))
        assert caught.value.intact
        weights.check(good)
        (answer,) = engine.generate([{"prompt_token_ids": [5, 6]}], greedy(3), use_tqdm=False)
        assert versions_of(answer.outputs[0]) in ({"1": 3}, None)
        weights.apply_weights(trainer.publish(7))
        weights.check(references(trainer.model))
