"""Weights into models of other kinds, which are packed ahead where all of their layers can be."""

import contextlib

import pytest
from vllm_ahead import check, receiver
from vllm_engines import checkpoint_of, model_of, start

from raycrew.tensor_transport import WeightPublisher

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("kind", "loaded_in_pauses"), [("no output layer", 1), ("experts", 3)])
def test_the_engine_computes_what_the_trainer_does(kind, loaded_in_pauses, store, directory, loads):
    engine = start(kind)
    engine.kind = kind
    with (
        contextlib.closing(WeightPublisher(store, directory=directory)) as publisher,
        receiver(engine, store, directory) as weights,
    ):
        for seed in (1, 2, 3):
            version = publisher.publish(checkpoint_of(model_of(kind, seed))).version
            weights.prepare_weights(version)
            weights.apply_weights(version)
            check(engine, weights, seed)
    assert len(loads) == loaded_in_pauses
    engine.llm_engine.engine_core.shutdown()
