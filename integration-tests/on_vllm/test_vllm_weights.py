"""Weights into a running vLLM, whose worker is this process."""

import contextlib
from pathlib import Path

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm_engines import (
    LONG,
    Trainer,
    assert_200_updates_take_no_memory,
    continued,
    greedy,
    model_of,
    references,
    start,
    versions_of,
    weights_of,
)

from raycrew.tensor_transport import (
    ManifestMismatchError,
    RouteStore,
    StaleWeightsError,
    WeightDirectory,
    WeightPublisher,
    WeightRoute,
    WeightUpdateError,
    sync_weights,
)
from raycrew.tensor_transport.integrations.vllm import (
    EngineLoadError,
    VllmWeights,
    WeightCheckError,
    _loading,
)
from raycrew.tensor_transport.testing import LocalPeers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture
def trainer(engine, store):
    with contextlib.closing(Trainer(engine.kind, store)) as trainer:
        yield trainer


class TestUpdates:
    def test_the_engine_computes_what_the_trainer_does(self, engine, trainer, store):
        with VllmWeights(engine, store=store) as weights:
            with pytest.raises(StaleWeightsError, match="holds no version yet"):
                weights.check(references(model_of(engine.kind, 0)))
            for seed in (1, 2, 3):
                receipt = weights.apply_weights(trainer.publish(seed))
                assert receipt.version == weights.require() == seed
                assert weights.check(references(trainer.model), tolerance=1e-4) < 1e-4
            with pytest.raises(WeightCheckError, match="the trainer with"):
                weights.check(references(model_of(engine.kind, 99)))

    def test_one_that_comes_late_loads_nothing_for_who_has_the_engine_by_then(self, engine, trainer, store):
        with VllmWeights(engine, store=store) as late:
            late.apply_weights(trainer.publish(1))
            with VllmWeights(engine, store=store) as weights:
                weights.apply_weights(trainer.publish(2))
                with pytest.raises(WeightUpdateError, match="of all workers of the engine answer"):
                    late.apply_weights(trainer.publish(3))
                weights.check(references(model_of(engine.kind, weights.require())), tolerance=1e-4)

    def test_a_state_dict_with_tied_names_does_as_well(self, engine, store):
        model = model_of(engine.kind, 4)
        with (
            VllmWeights(engine, store=store) as weights,
            contextlib.closing(WeightPublisher(store)) as publisher,
        ):
            weights.apply_weights(publisher.publish(model.state_dict()))
            weights.check(references(model))

    def test_what_lies_in_shared_memory_is_not_copied_before_it_is_loaded(
        self, engine, trainer, store, monkeypatch
    ):
        lies_there = watched(monkeypatch)
        for borrow in (False, True):
            with VllmWeights(engine, store=store, borrow=borrow) as weights:
                size = weights.apply_weights(update := trainer.publish(17)).size_bytes
                assert size == update.size_bytes
                weights.check(references(trainer.model))
                assert lies_there == [borrow]

    def test_outputs_say_which_version_made_them(self, engine, trainer, store):
        with VllmWeights(engine, store=store) as weights:
            weights.apply_weights(trainer.publish(5))
            (answer,) = engine.generate([{"prompt_token_ids": LONG}], greedy(4), use_tqdm=False)
            assert versions_of(answer.outputs[0]) in ({"1": 4}, None)

    @pytest.mark.parametrize("transport", ["gloo", "shared_memory"])
    def test_over_a_route_nothing_is_copied_either(self, engine, transport, monkeypatch):
        lies_there = watched(monkeypatch)
        directory = WeightDirectory.local()
        peer = Over(engine, directory)
        with WeightRoute(transport) as route:
            for seed in (6, 7):
                peer.seed = seed
                options = {"directory": directory, "route": route, "publish": "publish_weights"}
                sync_weights(LocalPeers([peer.trainer]), LocalPeers([peer]), **options)
                peer.weights.check(references(model_of(engine.kind, seed)))
                assert lies_there == [transport == "shared_memory"]
        peer.close()

    def test_200_updates_take_no_memory(self, engine, trainer, store):
        trainer.model = model_of(engine.kind, 8)
        with VllmWeights(engine, store=store) as weights:

            def update():
                published = trainer.publisher.publish(weights_of(trainer.model))
                return weights.apply_weights(published).size_bytes

            assert_200_updates_take_no_memory(update)
            weights.check(references(trainer.model))


class TestFailures:
    def test_what_lacks_tensors_is_never_served(self, engine, store):
        parts = {k: v for k, v in weights_of(model_of(engine.kind, 10)).items() if "k_proj.weight" not in k}
        with (
            VllmWeights(engine, store=store) as weights,
            contextlib.closing(WeightPublisher(store)) as publisher,
        ):
            with pytest.raises(WeightUpdateError, match="qkv_proj") as caught:
                weights.apply_weights(publisher.publish(parts))
            assert not caught.value.intact
            with pytest.raises(StaleWeightsError, match="mixture"):
                weights.require()
            weights.apply_weights(publisher.publish(weights_of(model_of(engine.kind, 11))))
            weights.check(references(model_of(engine.kind, 11)))

    def test_a_worker_that_fails_half_way_gets_the_version_before(self, engine, trainer, store, monkeypatch):
        with VllmWeights(engine, store=store) as weights:
            weights.apply_weights(trainer.publish(12))
            good = references(trainer.model)
            with monkeypatch.context() as patch:
                spoil_one_load(patch, weights)
                with pytest.raises(WeightUpdateError, match="rank 0") as caught:
                    weights.apply_weights(trainer.publish(13))
            assert caught.value.intact
            assert weights.require() == 1
            weights.check(good)
            weights.apply_weights(trainer.publish(14))
            weights.check(references(trainer.model))

    def test_names_that_are_not_the_trainers_are_refused_before_the_engine_is_touched(
        self, engine, trainer, store
    ):
        expected = weights_of(model_of(engine.kind, 0))
        with VllmWeights(engine, store=store, expected=expected) as weights:
            weights.apply_weights(trainer.publish(15))
            with pytest.raises(ManifestMismatchError):
                weights.apply_weights(trainer.publish(16, more=torch.zeros(2)))
            with pytest.raises(WeightUpdateError):
                weights.apply_weights(trainer.publisher.publish({"model.norm.weight": torch.ones(128)}))
            assert weights.require() == 1
            weights.check(references(model_of(engine.kind, 15)))


class TestRequestsUnderWay:
    """70 tokens of a prompt, some made with version 1, and an update before the others."""

    @pytest.fixture
    def weights(self, engine, trainer, store, request):
        with VllmWeights(engine, store=store, requests=request.param) as weights:
            weights.apply_weights(trainer.publish(20))
            engine.enqueue([{"prompt_token_ids": LONG}], greedy(12), use_tqdm=False)
            for _ in range(4):
                assert not any(output.finished for output in engine.llm_engine.step())
            weights.apply_weights(trainer.publish(21))
            yield weights

    @pytest.mark.parametrize("weights", ["continue"], indirect=True)
    def test_continue_as_if_the_new_weights_had_read_all(self, engine, weights):
        (answer,) = engine.wait_for_completion(use_tqdm=False)
        (sample,) = answer.outputs
        versions = versions_of(sample) or {"1": 4, "2": 12}
        assert list(versions) == ["1", "2"]
        old, new = model_of(engine.kind, 20), model_of(engine.kind, 21)
        assert list(sample.token_ids) == continued(old, new, LONG, versions["1"], 12)

    @pytest.mark.parametrize("weights", ["finish"], indirect=True)
    def test_finish_with_the_old_weights(self, engine, weights):
        (answer,) = weights.take_finished()
        assert weights.take_finished() == []
        (sample,) = answer.outputs
        assert list(sample.token_ids) == continued(model_of(engine.kind, 20), None, LONG, 12, 12)
        assert versions_of(sample) in ({"1": 12}, None)

    @pytest.mark.parametrize("weights", ["abort"], indirect=True)
    def test_abort(self, engine, weights):
        assert not engine.llm_engine.has_unfinished_requests()
        weights.check(references(model_of(engine.kind, 21)))


class Over:
    """A trainer and a generator that join a route."""

    def __init__(self, engine, directory):
        self.stores = RouteStore(), RouteStore()
        self.kind, self.seed = engine.kind, 0
        self.publisher = WeightPublisher(self.stores[0], directory=directory)
        self.weights = VllmWeights(engine, store=self.stores[1], directory=directory)
        self.apply_weights = self.weights.apply_weights
        self.join_route = self.stores[1].join
        self.trainer = self._Trainer(self)

    class _Trainer:
        def __init__(self, over):
            self.over, self.join_route = over, over.stores[0].join

        def publish_weights(self):
            model = model_of(self.over.kind, self.over.seed)
            return self.over.publisher.publish(weights_of(model))

    def close(self):
        self.weights.close()
        self.publisher.close()
        for store in self.stores:
            store.close()


def spoil_one_load(patch, weights):
    """Have the first load of the engine's worker stop half-way, and the next ones go through."""
    loader = weights._loader._stage.lend

    def lend(tensors):
        patch.undo()
        cut = len(tensors) // 2
        return loader([*tensors[:cut], ("no.such.weight", torch.zeros(3)), *tensors[cut:]])

    patch.setattr(weights._loader._stage, "lend", lend)


def watched(patch):
    """Whether the tensors that the engine's worker loads lie in shared memory; filled by each load."""
    lies_there, load = [], _loading.load

    def looking(model, weights, **how):
        given = list(weights)
        lies_there[:] = {is_in_shared_memory(tensor) for _, tensor in given}
        load(model, iter(given), **how)

    patch.setattr(_loading, "load", looking)
    return lies_there


def is_in_shared_memory(tensor):
    mapped = [
        line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line
    ]
    places = [[int(end, 16) for end in place.split("-")] for place in mapped]
    return any(start <= tensor.data_ptr() < stop for start, stop in places)


def test_what_a_connector_keeps_of_older_weights_is_not_computed_with(store, tmp_path):
    where = {"kv_connector": "FolderConnector", "kv_connector_module_path": "vllm_connector"}
    kept = {"kv_role": "kv_both", "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}
    kind = "separate embeddings"
    engine = start(kind, kv_transfer_config=KVTransferConfig(**where, **kept))
    with VllmWeights(engine, store=store) as weights, contextlib.closing(Trainer(kind, store)) as trainer:
        for seed in (1, 2):
            weights.apply_weights(trainer.publish(seed))
            assert not list(tmp_path.iterdir())
            weights.check(references(trainer.model), tolerance=1e-4)
            assert list(tmp_path.iterdir()), "it keeps what they compute"
    engine.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize("within", [False, True])
def test_a_connector_that_can_drop_nothing_is_refused(tmp_path, within):
    kept = {"kv_role": "kv_both", "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}
    how = {"kv_connector": "ExampleConnector", **kept}
    if within:
        several = {"kv_role": "kv_both", "kv_connector_extra_config": {"connectors": [how]}}
        how = {"kv_connector": "MultiConnector", **several}
    engine = start("separate embeddings", kv_transfer_config=KVTransferConfig(**how))
    with pytest.raises(EngineLoadError, match="ExampleConnector has no reset_cache"):
        VllmWeights(engine)
    engine.llm_engine.engine_core.shutdown()
