"""Versions that a vLLM packs ahead of their update, whose worker is this process."""

import contextlib
import gc
import operator

import pytest
import torch
from vllm_ahead import check, check_computes, noted, prepared_and_applied, receiver, step
from vllm_engines import (
    LONG,
    assert_200_updates_take_no_memory,
    continued,
    greedy,
    model_of,
    weights_of,
)

from raycrew.tensor_transport import StaleWeightsError, WeightUpdateError, sync_weights
from raycrew.tensor_transport.integrations.vllm import _ahead
from raycrew.tensor_transport.testing import LocalPeers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


class TestUpdates:
    def test_the_engine_computes_what_it_did_until_the_exchange_and_then_what_the_trainer_does(
        self, engine, trainer, weights, loads
    ):
        for seed in (2, 3, 4, 5):
            weights.prepare_weights(trainer.publish(seed).version)
            check(engine, weights, seed - 1)
            assert weights.apply_weights(seed).version == weights.require() == seed
            check(engine, weights, seed)
        assert not loads

    def test_a_worker_is_told_piece_by_piece(self, engine, trainer, weights, loads, monkeypatch):
        from raycrew.tensor_transport.integrations.vllm import _delivery

        monkeypatch.setattr(_delivery, "_AHEAD_BYTES", 1)
        pieces = []

        def between(work):
            check(engine, weights, 1)
            pieces.append(work())

        monkeypatch.setattr(weights, "_between_steps", between)
        weights.prepare_weights(trainer.publish(2).version)
        weights.apply_weights(2)
        check(engine, weights, 2)
        assert len(pieces) == len(weights_of(trainer.model)) + 1
        assert not loads

    @pytest.mark.parametrize("threads", [2, 3, 5])
    def test_what_is_packed_while_others_compute_by_more_threads_is_what_the_engine_reads(
        self, engine, trainer, weights, threads
    ):
        change, before = torch._C.set_num_threads, torch.get_num_threads()
        for seed in (2, 3):
            change(threads)
            try:
                weights.prepare_weights(trainer.publish(seed).version)
                if seed == 3:  # It is loaded in the pause.
                    weights._drop_ahead(operator.call)
                weights.apply_weights(seed)
            finally:
                change(before)
            check(engine, weights, seed)

    def test_tensors_may_come_in_any_order(self, engine, trainer, weights, loads):
        model = model_of(engine.kind, 2)
        trainer.publisher.publish(dict(reversed(weights_of(model).items())))
        weights.prepare_weights(2)
        weights.apply_weights(2)
        check(engine, weights, 2)
        assert not loads

    def test_what_the_prefix_cache_has_is_of_the_version_that_computes(self, engine, trainer, weights):
        def answer():
            (one,) = engine.generate([{"prompt_token_ids": LONG}], greedy(8), use_tqdm=False)
            return list(one.outputs[0].token_ids)

        old, new = (continued(model_of(engine.kind, seed), None, LONG, 8, 8) for seed in (1, 2))
        assert old != new
        assert answer() == old
        weights.prepare_weights(trainer.publish(2).version)
        assert answer() == old
        weights.apply_weights(2)
        assert [answer(), answer()] == [new, new]

    @pytest.mark.parametrize("requests", ["continue", "finish", "abort"])
    def test_requests_under_way(self, engine, store, directory, trainer, requests, loads):
        with receiver(engine, store, directory, requests=requests) as weights:
            weights.apply_weights(trainer.publish(1).version)
            engine.enqueue([{"prompt_token_ids": LONG}], greedy(12), use_tqdm=False)
            step(engine, 2)
            weights.prepare_weights(trainer.publish(2).version)
            step(engine, 2)
            weights.apply_weights(2)
            if requests == "abort":
                assert not engine.llm_engine.has_unfinished_requests()
                check(engine, weights, 2)
                return
            given = weights.take_finished() or engine.wait_for_completion(use_tqdm=False)
            after = 12 if requests == "finish" else 4
            old, new = model_of(engine.kind, 1), model_of(engine.kind, 2)
            assert list(given[0].outputs[0].token_ids) == continued(old, new, LONG, after, 12)
            assert len(loads) == 1

    def test_200_updates_take_no_memory(self, engine, trainer, weights, loads):
        made = model_of(engine.kind, 8)

        def update():
            version = trainer.publisher.publish(weights_of(made)).version
            weights.prepare_weights(version)
            return weights.apply_weights(version).size_bytes

        assert_200_updates_take_no_memory(update)
        check(engine, weights, 8)
        assert not loads


class TestNotApplied:
    def test_another_version_that_is_prepared(self, engine, trainer, weights, loads):
        for seed in (2, 3):
            weights.prepare_weights(trainer.publish(seed).version)
        weights.apply_weights(3)
        check(engine, weights, 3)
        assert not loads

    def test_another_version_that_is_not_prepared(self, engine, trainer, weights, loads):
        weights.prepare_weights(trainer.publish(2).version)
        weights.apply_weights(trainer.publish(3).version)
        check(engine, weights, 3)
        assert len(loads) == 1
        prepared_and_applied(trainer, weights, 4)
        check(engine, weights, 4)
        assert len(loads) == 1

    def test_a_pull(self, engine, trainer, weights, loads):
        weights.prepare_weights(trainer.publish(2).version)
        trainer.publish(3)
        assert weights.pull().version == 3
        check(engine, weights, 3)
        weights.prepare_weights(trainer.publish(4).version)
        assert weights.pull().version == 4
        check(engine, weights, 4)
        prepared_and_applied(trainer, weights, 5)
        check(engine, weights, 5)

    def test_others_that_the_engine_is_given_to(self, engine, store, directory, trainer, weights, loads):
        weights.prepare_weights(trainer.publish(2).version)
        weights.close()
        check_computes(engine, 1)
        with receiver(engine, store, directory) as other:
            with pytest.raises(StaleWeightsError):
                other.require()
            trainer.publish(3)
            other.prepare_weights(3)
            check_computes(engine, 1)
            other.apply_weights(3)
            check(engine, other, 3)
        assert not loads, "a model's plan outlives who wrote it"

    def test_one_that_is_closed_late_changes_nothing_for_who_has_the_engine_by_then(
        self, engine, store, directory, trainer, weights, loads
    ):
        weights.prepare_weights(trainer.publish(2).version)
        with receiver(engine, store, directory) as other:
            other.prepare_weights(2)
            weights.close()
            other.apply_weights(2)
            check(engine, other, 2)
            assert not loads
            prepared_and_applied(trainer, other, 3)
            check(engine, other, 3)

    def test_nothing_is_held_of_one_that_is_given_up(self, engine, trainer, weights, monkeypatch):
        held, take = [], _ahead.Ahead.take
        monkeypatch.setattr(
            _ahead.Ahead, "take", lambda ahead, given: take(ahead, noted(given, held)) or held.append(ahead)
        )
        weights.prepare_weights(trainer.publish(2).version)
        *tensors, ahead = held
        assert any(one() is not None for one in tensors)
        weights.close()
        gc.collect()
        assert not any(double.given for double in ahead._doubles)
        assert not any(one() is not None for one in tensors)

    def test_a_version_that_its_publisher_gave_up(self, engine, trainer, weights, directory):
        version = trainer.publish(2).version
        weights.prepare_weights(version)
        trainer.close()
        with contextlib.suppress(WeightUpdateError):
            weights.apply_weights(version)
        check(engine, weights, weights.version)

    def test_one_whose_other_generator_fails_returns_to_the_version_before(
        self, engine, store, trainer, weights, directory
    ):
        class Generator:
            prepare_weights, apply_weights = weights.prepare_weights, weights.apply_weights

        class Failing:
            def prepare_weights(self, version):
                return version

            def apply_weights(self, version):
                raise RuntimeError("no")

        class Publishing:
            def publish_weights(self):
                return trainer.publish(2)

        with pytest.raises(Exception, match="no"):
            sync_weights(
                LocalPeers([Publishing()]),
                LocalPeers([Generator(), Failing()]),
                directory=directory,
                prepare="prepare_weights",
            )
        assert weights.require() == 1
        check(engine, weights, 1)
        prepared_and_applied(trainer, weights, 3)
        check(engine, weights, 3)
