"""What a vLLM can't pack ahead of an update, or fails of: it is right all the same, or refused."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
from vllm_ahead import check, check_computes, failing_after, prepared_and_applied, receiver, worker_of
from vllm_engines import LONG, greedy, model_of, references, weights_of

from raycrew.tensor_transport import StaleWeightsError, WeightPublisher, WeightUpdateError
from raycrew.tensor_transport.integrations.vllm import _ahead, _layers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


class TestFailures:
    @pytest.mark.parametrize("what", ["run", "pack"])
    def test_one_that_fails_ahead_is_loaded_in_the_pause(
        self, engine, trainer, weights, loads, monkeypatch, what
    ):
        with monkeypatch.context() as patch:
            left = failing_after(patch, what, 3)
            weights.prepare_weights(trainer.publish(2).version)
            assert not left, "it failed"
        check(engine, weights, 1)
        weights.apply_weights(2)
        check(engine, weights, 2)
        assert len(loads) == 1
        prepared_and_applied(trainer, weights, 3)
        check(engine, weights, 3)
        assert len(loads) == 1

    @pytest.mark.parametrize("after", [0, 3])
    def test_an_exchange_that_fails_half_way_is_never_served(
        self, engine, trainer, weights, loads, monkeypatch, after
    ):
        weights.prepare_weights(trainer.publish(2).version)
        with monkeypatch.context() as patch:
            left = failing_after(patch, "exchange", after)
            with pytest.raises(WeightUpdateError, match="rank 0") as caught:
                weights.apply_weights(2)
            assert not left
        assert caught.value.intact
        assert weights.require() == 1
        check(engine, weights, 1)
        prepared_and_applied(trainer, weights, 3)
        check(engine, weights, 3)
        assert len(loads) == 1

    def test_where_nothing_leads_back_a_mixture_is_refused_until_an_update(
        self, engine, store, directory, trainer, monkeypatch
    ):
        with receiver(engine, store, directory, rollback="none") as weights:
            weights.apply_weights(trainer.publish(1).version)
            weights.prepare_weights(trainer.publish(2).version)
            with monkeypatch.context() as patch:
                failing_after(patch, "exchange", 3)
                with pytest.raises(WeightUpdateError):
                    weights.apply_weights(2)
            with pytest.raises(StaleWeightsError, match="mixture"):
                weights.require()
            prepared_and_applied(trainer, weights, 3)
            check(engine, weights, 3)

    def test_an_interrupt_leaves_the_engine_as_it_is(self, engine, trainer, weights, monkeypatch):
        def interrupted(work):
            work()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(weights, "_between_steps", interrupted)
            with pytest.raises(KeyboardInterrupt):
                weights.prepare_weights(trainer.publish(2).version)
        check(engine, weights, 1)
        weights.apply_weights(2)
        check(engine, weights, 2)

    def test_what_can_not_be_packed_ahead_is_loaded_in_the_pause(
        self, engine, store, directory, trainer, loads, monkeypatch
    ):
        monkeypatch.setattr(_layers, "_NORMS", ())
        with receiver(engine, store, directory) as weights:
            weights.apply_weights(trainer.publish(1).version)
            for seed in (2, 3):
                prepared_and_applied(trainer, weights, seed)
                check(engine, weights, seed)
        assert len(loads) == 3

    def test_tensors_that_a_model_made_of_what_it_was_given_are_not_packed_ahead(
        self, engine, store, directory, trainer, loads, monkeypatch
    ):
        model = worker_of(engine).model
        load = model.load_weights
        monkeypatch.setattr(
            model, "load_weights", lambda given: load((name, tensor.clone()) for name, tensor in given)
        )
        with receiver(engine, store, directory) as weights:
            weights.apply_weights(trainer.publish(1).version)
            prepared_and_applied(trainer, weights, 2)
            check(engine, weights, 2)
        assert len(loads) == 2

    def test_what_a_layer_keeps_of_its_parameters_is_not_the_next_layers(
        self, engine, trainer, weights, monkeypatch
    ):
        method, packs = (
            _layers.UnquantizedLinearMethod,
            _layers.UnquantizedLinearMethod.process_weights_after_loading,
        )

        def keeping(self, layer):
            layer.as_loaded = layer.weight.detach()
            packs(self, layer)

        monkeypatch.setattr(method, "process_weights_after_loading", keeping)
        prepared_and_applied(trainer, weights, 2)
        name = "model.layers.0.self_attn.o_proj"
        kept = worker_of(engine).model.get_submodule(name).as_loaded
        assert torch.equal(kept, trainer.model.get_submodule(name).weight)

    def test_a_layer_some_of_whose_parameters_nothing_loads_has_no_plan(self):
        module = torch.nn.Linear(2, 2)
        module.quant_method = object()
        given = {"w": torch.zeros(2, 2), "b": torch.zeros(2)}
        calls = [
            _layers.Call(torch.Tensor.copy_, (parameter, given[name[0]]), {})
            for name, parameter in module.named_parameters()
        ]
        layer = SimpleNamespace(
            module=module, parameters=dict(module.named_parameters()), kept={}, calls=calls
        )
        names = {id(tensor): name for name, tensor in given.items()}
        assert len(_ahead._layer_plan(layer, names).steps) == 2
        del calls[1]
        assert _ahead._layer_plan(layer, names) is None


class TestOtherTensors:
    """Than those that the plan was made of: the update is right, or refused, and the engine stays right."""

    @pytest.fixture
    def fresh(self, engine, store, directory, trainer):
        """A receiver that knows nothing of the tensors, of an engine that was loaded with a version 1."""
        with receiver(engine, store, directory) as before:
            before.apply_weights(trainer.publish(1).version)
        with receiver(engine, store, directory) as weights:
            yield weights

    def test_fewer(self, engine, trainer, fresh):
        model = model_of(engine.kind, 2)
        trainer.publisher.publish({k: v for k, v in weights_of(model).items() if "k_proj.weight" not in k})
        fresh.prepare_weights(2)
        check_computes(engine, 1)
        with pytest.raises(WeightUpdateError, match="qkv_proj"):
            fresh.apply_weights(2)
        with pytest.raises(StaleWeightsError):
            fresh.require()
        prepared_and_applied(trainer, fresh, 3)
        check(engine, fresh, 3)

    def test_more(self, engine, trainer, fresh):
        trainer.publish(2, **{"no.such.weight": torch.zeros(2)})
        fresh.prepare_weights(2)
        check_computes(engine, 1)
        with pytest.raises(WeightUpdateError):
            fresh.apply_weights(2)
        prepared_and_applied(trainer, fresh, 3)
        check(engine, fresh, 3)

    @pytest.mark.parametrize("part", ["norm.weight", "down_proj.weight"])
    def test_of_other_shapes(self, engine, trainer, fresh, part):
        model = model_of(engine.kind, 2)
        name = next(name for name in weights_of(model) if name.endswith(part))
        trainer.publish(2, **{name: torch.zeros(3)})
        fresh.prepare_weights(2)
        check_computes(engine, 1)
        with pytest.raises(WeightUpdateError):
            fresh.apply_weights(2)
        with pytest.raises(StaleWeightsError):
            fresh.require()
        prepared_and_applied(trainer, fresh, 3)
        check(engine, fresh, 3)

    def test_of_another_dtype(self, engine, trainer, fresh, loads):
        model = model_of(engine.kind, 2)
        given = {name: tensor.detach().bfloat16() for name, tensor in weights_of(model).items()}
        trainer.publisher.publish(given)
        model.load_state_dict(given, strict=False)
        fresh.prepare_weights(2)
        fresh.apply_weights(2)
        fresh.check(references(model))
        assert not loads

    def test_tied_ones_named_once_and_twice(self, engine, store, directory, trainer, fresh):
        for seed in (2, 3):
            model = model_of(engine.kind, seed)
            trainer.publisher.publish(model.state_dict() if seed == 2 else weights_of(model))
            with receiver(engine, store, directory) as weights:
                weights.prepare_weights(seed)
                weights.apply_weights(seed)
                check(engine, weights, seed)

    def test_untied_ones(self, engine, store, directory, trainer, fresh):
        """Two matrices, where the engine was made for one: whichever is right, both may not be served."""
        if engine.kind != "tied embeddings, biases":
            pytest.skip("the engine has two")
        trainer.publish(2, **{"lm_head.weight": torch.randn(100, 128)})
        seen = []
        for how in ("prepare_weights", "apply_weights"):
            with receiver(engine, store, directory) as weights:
                getattr(weights, how)(2)
                weights.apply_weights(2)
                (one,) = engine.generate([{"prompt_token_ids": LONG}], greedy(8), use_tqdm=False)
                seen.append(list(one.outputs[0].token_ids))
        assert seen[0] == seen[1], "it is the same as loaded in the pause"

    def test_in_pieces_of_two_publishers(self, engine, store, directory, fresh, trainer, loads):
        trainer.close()
        with contextlib.ExitStack() as ended:
            parts = [
                ended.enter_context(
                    contextlib.closing(WeightPublisher(store, directory=directory, part=part, parts=2))
                )
                for part in range(2)
            ]
            for seed in (2, 3):
                tensors = list(weights_of(model_of(engine.kind, seed)).items())
                threads = [
                    threading.Thread(
                        target=one.publish, args=(dict(tensors[at::2]),), kwargs={"version": seed}
                    )
                    for at, one in enumerate(parts)
                ]
                for thread in threads:
                    thread.start()
                fresh.prepare_weights(seed)
                for thread in threads:
                    thread.join()
                fresh.apply_weights(seed)
                check(engine, fresh, seed)
        assert not loads
