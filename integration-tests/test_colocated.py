"""A trainer and a generator on the same bundles, awake in turns."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from colocated_echo import SIZE, EchoLearner
from colocated_turns import PROMPTS, both_on_one_bundle, check_marks, check_steps, kill
from generation_echo import MODEL as ECHO
from generation_echo import EchoEngine, EchoTrainer
from generation_stage import MODEL, batch_of, local_stage, rows_of

from colocated import Colocated
from generation import AsleepError, EngineOptions, RefusedError, start_generators
from generation.worker import GenerationWorker
from learner import Learner
from raycrew.cluster_core.testing import FakeCluster, connected
from raycrew.tensor_transport import BatchedDataDict, RaggedTensor, WeightDirectory

LARGE = {**MODEL, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
WEIGHTS_BYTES = 4 * 8 * (3 * 1024 * 256 + 3 * 256 * 256)


def echoes(folder):
    """Both of them without a model."""
    return both_on_one_bundle(
        "generation_echo.EchoWorker", ECHO, folder, learner="colocated_echo.EchoLearner"
    )


def test_both_have_the_same_bundle_in_turns(local_ray_session, tmp_path):
    with connected(local_ray_session), echoes(tmp_path) as both:
        check_steps(both, (1, 2))
        check_marks(both.phases.report(), SIZE)
        assert both.generators.call("explain")[0].startswith("asleep: there is no engine; wake() makes one")


@pytest.mark.long  # in short: test_phases_on_ray of worker-groups
def test_one_that_dies_asleep_is_replaced_in_its_turn_and_goes_on(local_ray_session, tmp_path):
    with connected(local_ray_session), echoes(tmp_path) as both:
        check_steps(both, [1])
        dead = kill(both.generators.group)
        check_steps(both, [2])
        assert both.generators.call("pid") != [dead]
        with both.phases.turn("generate"):
            kill(both.trainer)
        assert both.step(PROMPTS, {"max_tokens": 2}) == (3.0, {3}), "it knows what it had learnt"
        check_steps(both, [4])


def test_what_was_learnt_is_published_by_who_has_learnt_it(tmp_path, monkeypatch):
    """Who replaces it in between knows what it was before, and would publish that as a new version."""
    published = []
    monkeypatch.setattr(EchoLearner, "publish_weights", lambda learner: published.append(learner.learnt))

    def call(method, *given):
        replaced = EchoLearner({}, WeightDirectory.local(), tmp_path)
        found = getattr(replaced, method)(*given)
        return SimpleNamespace(get_results=lambda: [found])

    samples = {"weight_versions": SimpleNamespace(values=torch.tensor([1]))}
    generators = SimpleNamespace(generate=lambda *_: samples)
    phases, trainer = SimpleNamespace(turn=lambda _: nullcontext()), SimpleNamespace(call=call)
    assert Colocated(phases, trainer, generators).step(PROMPTS, {}) == (1.0, {1})
    assert published == [1]


@pytest.mark.long  # in short: the same without models
def test_a_model_and_its_optimizer_make_room_for_a_generator(local_ray_session, tmp_path):
    with connected(local_ray_session), both_on_one_bundle("transformers", LARGE, tmp_path) as both:
        check_steps(both, (1, 2, 3))
        check_marks(both.phases.report(), 3 * WEIGHTS_BYTES)
        assert "optimizer state to a file" in both.trainer.call("explain").get_results()[0]


@pytest.mark.gpu
def test_both_have_a_device_in_turns(local_ray_session, tmp_path):
    with (
        connected(local_ray_session),
        both_on_one_bundle("transformers", LARGE, tmp_path, use_gpus=True) as both,
    ):
        check_steps(both, (1, 2))
        turns = {name: both.phases.report().phases[name].ranks for name in ("train", "generate")}
        for awake, asleep in (("train", "generate"), ("generate", "train")):
            kept, given_up = (turns[turn][awake][0].device_bytes for turn in (awake, asleep))
            assert kept - (given_up or 0) > 0.5 * WEIGHTS_BYTES
        assert "the host's memory" in both.trainer.call("explain").get_results()[0]


def test_a_learner_that_was_offloaded_goes_on_as_if_it_had_not_been(tmp_path):
    with WeightDirectory.local() as directory:
        outputs = [torch.tensor([at, 3, 40 + at]) for at in (1, 20, 7, 13)]
        columns = {"prompt_index": torch.tensor([0, 0, 1, 1]), "output_ids": RaggedTensor.from_rows(outputs)}
        samples = BatchedDataDict(columns)

        def after_three(name, offloaded):
            (tmp_path / name).mkdir()
            learner = Learner(MODEL, directory, str(tmp_path / name), asleep=offloaded)
            for _ in range(3):
                learner.onload()
                learner.learn(PROMPTS, samples)
                if offloaded:
                    learner.offload()
                    learner.offload()
                    assert learner.model is None
            learner.onload()
            return learner.model.state_dict()

        here, there = after_three("awake", False), after_three("asleep", True)
        assert all(torch.equal(here[name], there[name]) for name in here)
        replaced = Learner(MODEL, directory, str(tmp_path / "asleep")).model.state_dict()
        assert all(torch.equal(here[name], replaced[name]) for name in here), "who replaces it goes on"


def test_a_single_sample_teaches_a_learner_nothing(tmp_path):
    with WeightDirectory.local() as directory:
        learner = Learner(MODEL, directory, str(tmp_path))
        one = {
            "prompt_index": torch.tensor([0]),
            "output_ids": RaggedTensor.from_rows([torch.tensor([1, 3])]),
        }
        learner.learn(PROMPTS, BatchedDataDict(one))
        assert all(weights.isfinite().all() for weights in learner.model.state_dict().values())


class DozingEngine(EchoEngine):
    """Forgets its weights while it sleeps, and stays."""

    dozes = True
    made = failures = 0

    def __init__(self):
        super().__init__()
        type(self).made += 1

    def doze(self):
        self.add_up = None

    def rouse(self):
        assert self.add_up is None
        self.add_up = 0
        if self.failures:
            type(self).failures -= 1
            raise RuntimeError("the device has no room")


class DozingWorker(GenerationWorker):
    def create_engine(self, seed):
        return DozingEngine()


def test_an_engine_that_stays_while_it_sleeps_wakes_with_current_weights_or_is_made_anew():
    with local_stage(DozingWorker, ECHO, EchoTrainer) as stage:
        for _ in range(2):
            stage.call("pause")
            stage.call("sleep", "abort")
            assert "given up its memory" in stage.call("explain")
            assert stage.metrics().state == "asleep"
            stage.model.publish_weights()
            stage.call("wake")
            assert stage.metrics().state == "awake", "as one that was made anew"
            rows = rows_of(stage.generate(batch_of(), {"max_tokens": 3}))
            assert {value for row in rows for value in row[3]} == {float(stage.version)}
        stage.call("sleep")
        stage.call("wake")
        assert stage.metrics().weight_version == stage.version, "the same version is loaded again"
        assert DozingEngine.made == 1
        stage.call("sleep")
        DozingEngine.failures = 1
        with stage.refused(RuntimeError, "no room"):
            stage.call("wake")
        assert "there is no engine" in stage.call("explain")
        stage.call("wake")
        assert (DozingEngine.made, stage.metrics().weight_version) == (2, stage.version)


def test_samples_that_wait_when_an_engine_that_stays_goes_to_sleep_end_with_it():
    with local_stage(DozingWorker, ECHO, EchoTrainer) as stage:
        stage.call("pause")
        waiting = stage.begin(batch_of(), {"max_tokens": 3})
        stage.wait_for(lambda found: found.waiting)
        loop = stage.worker._life.awake.loop
        stage.call("sleep")
        assert {(row[5], len(row[2])) for row in rows_of(waiting.result(60))} == {("abort", 0)}
        with pytest.raises(AsleepError):  # who was admitted just before
            loop.submit([], lambda *_: None).result(60)
        stage.call("wake")
        assert {row[5] for row in rows_of(stage.generate(batch_of(), {"max_tokens": 3}))} == {"length"}


def test_sleep_levels_are_refused_where_there_are_none():
    with pytest.raises(RefusedError, match="no sleep mode on CPUs"):
        start_generators(FakeCluster([1]), "vllm", EngineOptions(MODEL, sleep_level=2))
    for wrong in ({"sleep_level": 3}, {"sleep_level": 2, "max_adapters": 1}):
        with pytest.raises(ValueError, match="sleep level"):
            EngineOptions(MODEL, **wrong)
