"""Receivers that have versions packed ahead, and what goes wrong with that; imported only where vLLM is."""

import operator
import weakref

import pytest
from vllm_engines import LONG, continued, greedy, model_of, references

from raycrew.tensor_transport.integrations.vllm import VllmWeights, _ahead, _layers


def receiver(engine, store, directory, **options):
    return VllmWeights(engine, store=store, directory=directory, **{"between_steps": operator.call} | options)


def check(engine, weights, seed):
    weights.check(references(model_of(engine.kind, seed)), tolerance=1e-4)


def noted(tensors, where):
    """Tensors, of which only a weak reference is kept each."""
    for name, tensor in tensors:
        where.append(weakref.ref(tensor))
        yield name, tensor


def prepared_and_applied(trainer, weights, seed):
    version = trainer.publish(seed).version
    weights.prepare_weights(version)
    weights.apply_weights(version)


def step(engine, times):
    for _ in range(times):
        assert not any(output.finished for output in engine.llm_engine.step())


def check_computes(engine, seed):
    """What the engine itself computes, whoever has its weights."""
    (one,) = engine.generate([{"prompt_token_ids": LONG}], greedy(8), use_tqdm=False)
    assert list(one.outputs[0].token_ids) == continued(model_of(engine.kind, seed), None, LONG, 8, 8)


def worker_of(engine):
    """vLLM's weight transfer of the worker."""
    return (
        engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.weight_transfer_engine
    )


def failing_after(patch, what, times):
    """Have a loader, what packs, or an exchange raise once, after so many times; emptied then."""
    owner, name = {
        "run": (_ahead._Step, "run"),
        "pack": (_layers.UnquantizedLinearMethod, "process_weights_after_loading"),
        "exchange": (_ahead._Double, "exchange"),
    }[what]
    does, left = getattr(owner, name), [None] * (times + 1)

    def failing(*args):
        if left:
            left.pop()
            if not left:
                raise RuntimeError(f"{what} fails")
        return does(*args)

    patch.setattr(owner, name, failing)
    return left


def fail_in_worker(worker, rank, what):
    """What `collective_rpc` calls: have what `failing_after` knows raise once in a worker."""
    if worker.rank == rank:
        failing_after(pytest.MonkeyPatch(), what, 3)
