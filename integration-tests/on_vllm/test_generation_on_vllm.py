"""The generation worker of vLLM does what every generation worker does."""

import json
import multiprocessing
import os
import signal
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent.parent))
pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]

from endpoint_conformance import COMPLETIONS  # noqa: E402
from endpoint_words import ask, save_tokenizer, told  # noqa: E402
from generation_conformance import (  # noqa: E402
    LONG,
    TOLERANCE,
    Conformance,
    assert_plain,
    check_what_waits_for_room,
)
from generation_stage import (  # noqa: E402
    MODEL,
    PROMPTS,
    Trainer,
    batch_of,
    group_stage,
    local_stage,
    rows_of,
    survive,
)

from generation import EndpointOptions, EngineFailedError, EngineOptions, RefusedError  # noqa: E402
from generation.vllm_worker import VllmWorker  # noqa: E402
from raycrew.tensor_transport import WeightUpdateError  # noqa: E402
from raycrew.worker_groups import WorkerFailureError  # noqa: E402


class TestVllm(Conformance):
    @pytest.fixture(scope="class")
    @classmethod
    def stage(cls):
        with local_stage(VllmWorker) as made:
            yield made


def test_an_adapter_is_as_good_as_weights_with_it_merged(tmp_path):
    folder, deltas = make_adapter(tmp_path / "adapter")
    endpoint = EndpointOptions(tokenizer=save_tokenizer(tmp_path / "words"))
    greedy = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    options = {"max_adapters": 1, "max_adapter_rank": 8}
    with (
        local_stage(VllmWorker, worker_options={"endpoint": endpoint}, **options) as stage,
        ExitStack() as ended,
    ):
        ended.callback(stage.call, "close_endpoint")
        plain = rows_of(stage.generate(batch_of(), greedy))
        stage.call("load_adapter", "tuned", folder)
        with stage.refused(RefusedError, "which is the most"):
            stage.call("load_adapter", "other", folder)
        tuned = rows_of(stage.generate(batch_of(), greedy, adapter="tuned"))
        assert [row[2] for row in tuned] != [row[2] for row in plain]
        assert rows_of(stage.generate(batch_of(), greedy)) == plain, "who names none has none"
        with merged(stage, deltas):
            for row in tuned:
                assert_plain(stage, PROMPTS, row)
        asked = {"model": "tuned", "prompt": PROMPTS[0], "return_token_ids": True, **greedy}
        (choice,) = told(stage.call("endpoint"), COMPLETIONS, asked)["choices"]
        assert choice["token_ids"] == tuned[0][2], "over HTTP it is a model"
        assert told(stage.call("endpoint"), "/v1/models/tuned")["id"] == "tuned"
        stage.call("pause")
        waits = stage.begin(batch_of(), greedy, adapter="tuned")
        stage.wait_for(lambda found: found.waiting == len(PROMPTS))
        stage.call("unload_adapter", "tuned")
        stage.call("resume")
        for result in (waits.result, lambda _: stage.generate(batch_of(), greedy, adapter="tuned")):
            with stage.refused(RefusedError, "no adapter 'tuned'"):
                result(120)
        assert ask(stage.call("endpoint"), COMPLETIONS, asked)[0] == 404


@pytest.mark.parametrize("size", [1, 2])
def test_an_adapter_that_can_not_be_loaded_leaves_the_one_of_its_name(tmp_path, size):
    greedy = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    (tmp_path / "empty").mkdir()
    with local_stage(VllmWorker, tensor_parallel=size, max_adapters=1) as stage:
        folder, deltas = make_adapter(tmp_path / "adapter")
        stage.call("load_adapter", "tuned", folder)
        for wrong in (tmp_path / "empty", make_adapter(tmp_path / "large", rank=32)[0]):
            with stage.refused(RefusedError, "adapter 'tuned' is not loaded from"):
                stage.call("load_adapter", "tuned", str(wrong))
            stage.sync()
            stage.check(tolerance=TOLERANCE)
            rows = rows_of(stage.generate(batch_of(), greedy, adapter="tuned"))
            with merged(stage, deltas):
                for row in rows:
                    assert_plain(stage, PROMPTS, row)
        stage.call("unload_adapter", "tuned")
        with stage.refused(RefusedError, "not loaded from"):
            stage.call("load_adapter", "other", str(wrong))
        with stage.refused(RefusedError, "no adapter 'other'"):
            stage.generate(batch_of(), greedy, adapter="other")


def test_an_adapter_that_was_trained_further_is_another_one_and_stays_through_an_update(tmp_path, loads):
    prompts = [[5 + at % 40 for at in range(200)]]
    greedy = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    with local_stage(VllmWorker, prefix_caching=True, max_adapters=1) as stage:

        def check():
            for _ in range(2):  # the second time the prompt is known
                (row,) = rows_of(stage.generate(batch_of(prompts), greedy, adapter="tuned"))
                with merged(stage, deltas):
                    assert_plain(stage, prompts, row)

        for _ in range(2):
            folder, deltas = make_adapter(tmp_path / "adapter")  # where the one before was
            stage.call("load_adapter", "tuned", folder)
            check()
        (before,) = rows_of(stage.generate(batch_of(prompts), greedy, adapter="tuned"))
        version = stage.model.publish_weights().version
        stage.call("prepare_weights", version)
        (beside,) = rows_of(stage.generate(batch_of(prompts), greedy, adapter="tuned"))
        assert beside[2] == before[2]
        stage.call("apply_weights", version)
        check()
        assert len(loads) == 1, "of the first version: the other one was packed ahead"


@contextmanager
def merged(stage, deltas):
    """What the trainer has as its last version has so much more of some weights within the context."""
    model = stage.model.model(stage.version)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: tensor + deltas.get(name, 0) for name, tensor in before.items()})
    yield
    model.load_state_dict(before)


def make_adapter(folder, rank=8):
    """Write an adapter for the queries; gives its folder, and what it adds to each weight, by name."""
    folder.mkdir(exist_ok=True)
    deltas, tensors = {}, {}
    for layer in range(MODEL["num_hidden_layers"]):
        size = MODEL["hidden_size"]
        name = f"model.layers.{layer}.self_attn.q_proj"
        down, up = 0.3 * torch.randn(rank, size), 0.3 * torch.randn(size, rank)
        tensors |= {
            f"base_model.model.{name}.lora_{which}.weight": t for which, t in (("A", down), ("B", up))
        }
        deltas[f"{name}.weight"] = up @ down
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder), deltas


def test_an_engine_over_a_tied_group_is_updated_and_ends_with_its_processes(local_ray):
    with group_stage("vllm", 2, options={"tensor_parallel": 2}, name_prefix="tied") as stage:
        assert stage.generators.leaders == (0,)
        assert "in processes of its own (mp)" in stage.call("explain")
        future = stage.begin(batch_of(), LONG)
        stage.wait_for(lambda found: found.running)
        stage.sync()
        for row in rows_of(future.result(120)):
            assert_plain(stage, PROMPTS, row)
        pid = stage.call("pid")
        processes = [one for one in psutil.Process(pid).children() if "Worker" in " ".join(one.cmdline())]
        assert len(processes) == 2
        found = survive(stage, pid, batch_of(), LONG)
        assert not psutil.wait_procs(processes, timeout=60)[1], "nobody goes on without its engine"
        assert sorted(row[0] for row in found) == [0, 1, 2, 3]
        for row in found:
            assert set(row[4]) == {stage.version}
            assert_plain(stage, PROMPTS, row)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2])
def test_an_engine_whose_processes_are_actors_is_updated_on_the_groups_own_bundles(local_ray, size):
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    how = {"tensor_parallel": size, "executor": "ray"}
    with group_stage("vllm", size, options=how, use_gpus=True, name_prefix="actors") as stage:
        assert "in processes of its own (ray)" in stage.call("explain")
        future = stage.begin(batch_of(), LONG)
        stage.wait_for(lambda found: found.running)
        stage.sync()
        for row in rows_of(future.result(120)):
            assert_plain(stage, PROMPTS, row)


class Killing(Trainer):
    """Has a process killed when it has published, which others fetch then."""

    victim = None

    def publish_weights(self):
        update = super().publish_weights()
        if self.victim is not None:
            os.kill(self.victim, signal.SIGKILL)
            self.victim = None
        return update


def test_one_that_is_killed_in_an_update_is_replaced_and_takes_the_next_one(local_ray):
    with group_stage("vllm", trainer=Killing, name_prefix="updated") as stage:
        stage.model.victim = before = stage.call("pid")
        with pytest.raises((WorkerFailureError, WeightUpdateError)):
            stage.sync()
        assert stage.sync() == stage.version
        assert stage.call("pid") != before
        rows = rows_of(stage.generators.generate(batch_of(), LONG))
        assert [row[:2] for row in rows] == [(prompt, 0) for prompt in range(len(PROMPTS))]
        for row in rows:
            assert set(row[4]) == {stage.version}
            assert_plain(stage, PROMPTS, row)


def test_a_process_of_an_engine_that_dies_ends_samples_with_an_error_and_the_engine_is_made_anew():
    with local_stage(VllmWorker, tensor_parallel=2) as stage:
        future = stage.begin(batch_of(), LONG)
        stage.wait_for(lambda found: found.running)
        (dead,) = (child for child in multiprocessing.active_children() if child.name == "VllmWorker-1")
        dead.kill()
        for result in (lambda: future.result(120), lambda: stage.generate(batch_of())):
            with pytest.raises(EngineFailedError):
                result()
        stage.call("sleep")
        assert not multiprocessing.active_children(), "an engine that sleeps has no processes"
        stage.call("wake")
        for row in rows_of(stage.generate(batch_of(), LONG)):
            assert_plain(stage, PROMPTS, row)


def test_what_an_engine_has_no_room_for_waits():
    check_what_waits_for_room(VllmWorker)


@pytest.mark.parametrize("options", [{"executor": "ray"}, {"sleep_level": 1}])
def test_what_vllm_can_not_do_on_a_cpu_is_refused_by_name_and_no_engine_starts(options, monkeypatch):
    from generation import vllm_engine

    monkeypatch.setattr(vllm_engine, "LLM", None)
    options = EngineOptions(MODEL, **options)
    for make in (lambda: vllm_engine.VllmEngine(options, 0), lambda: VllmWorker(options)):
        with pytest.raises(RefusedError, match="on CPUs"):
            make()


class Known:
    """Whether vLLM knows a prompt from before."""

    prompts = batch_of([[5 + at % 40 for at in range(200)]])

    def __init__(self, stage):
        self.stage = stage

    def __call__(self):
        before = self._hits()
        (row,) = rows_of(
            self.stage.generate(self.prompts, {"temperature": 0, "max_tokens": 4, "ignore_eos": True})
        )
        assert_plain(self.stage, self.prompts["prompt_ids"], row)
        assert set(row[4]) == {self.stage.version}
        return self._hits() > before

    def _hits(self):
        found = self.stage.worker._life.awake.loop.engine._llm.get_metrics()
        return next(metric.value for metric in found if metric.name == "vllm:prefix_cache_hits")


def test_prompts_are_known_again_until_that_is_to_be_forgotten_or_the_weights_are_others():
    with local_stage(VllmWorker, prefix_caching=True, more={"disable_log_stats": False}) as stage:
        is_known = Known(stage)
        assert [is_known() for _ in range(2)] == [False, True]
        stage.call("reset_prefix_cache")
        assert [is_known() for _ in range(2)] == [False, True]
        stage.sync()
        assert [is_known() for _ in range(2)] == [False, True]
        future = stage.begin(batch_of(), LONG)
        stage.wait_for(lambda found: found.running)
        stage.call("reset_prefix_cache")
        assert not is_known(), "also while samples are on their way"
        for row in rows_of(future.result(120)):
            assert len(row[2]) == LONG["max_tokens"]
            assert_plain(stage, PROMPTS, row)
