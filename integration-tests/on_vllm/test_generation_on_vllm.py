"""The generation worker of vLLM does what every generation worker does."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent.parent))
pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]

from generation_conformance import LONG, Conformance, assert_plain  # noqa: E402
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

from generation import RefusedError  # noqa: E402
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
    deltas = make_adapter(tmp_path)
    greedy = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    with local_stage(VllmWorker, max_adapters=1, max_adapter_rank=8) as stage:
        plain = rows_of(stage.generate(batch_of(), greedy))
        stage.call("load_adapter", "tuned", str(tmp_path))
        with stage.refused(RefusedError, "which is the most"):
            stage.call("load_adapter", "other", str(tmp_path))
        tuned = rows_of(stage.generate(batch_of(), greedy, adapter="tuned"))
        assert [row[2] for row in tuned] != [row[2] for row in plain]
        assert rows_of(stage.generate(batch_of(), greedy)) == plain, "who names none has none"
        with torch.no_grad():
            for name, parameter in stage.model.model(stage.version).named_parameters():
                parameter += deltas.get(name, 0)
        for row in tuned:
            assert_plain(stage, PROMPTS, row)
        stage.call("unload_adapter", "tuned")
        with stage.refused(RefusedError, "no adapter 'tuned'"):
            stage.generate(batch_of(), greedy, adapter="tuned")


def make_adapter(folder, rank=8):
    """Write an adapter for the queries; gives what it adds to each weight, by name."""
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
    return deltas


def test_an_engine_over_a_tied_group_is_updated_and_ends_with_its_processes(local_ray):
    with group_stage("vllm", 2, options={"tensor_parallel": 2}, name_prefix="tied") as stage:
        assert stage.generators.leaders == (0,)
        assert "in processes of its own (mp)" in stage.call("explain")
        future = stage.begin(batch_of(), LONG)
        stage.wait_for(lambda found: found.running)
        stage.sync()
        for row in rows_of(future.result(120)):
            assert_plain(stage, PROMPTS, row)
        found = survive(stage, stage.call("pid"), batch_of(), LONG)
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


def test_prompts_are_known_again_until_that_is_to_be_forgotten_or_the_weights_are_others():
    prompts = batch_of([[5 + at % 40 for at in range(200)]])
    greedy = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    with local_stage(VllmWorker, prefix_caching=True) as stage:

        def hits_of_another():
            def hits():
                found = stage.worker._life.awake.loop.engine._llm.get_metrics()
                return next(metric.value for metric in found if metric.name == "vllm:prefix_cache_hits")

            before = hits()
            (row,) = rows_of(stage.generate(prompts, greedy))
            assert_plain(stage, prompts["prompt_ids"], row)
            assert set(row[4]) == {stage.version}
            return hits() - before

        assert [hits_of_another() > 0 for _ in range(2)] == [False, True]
        stage.call("reset_prefix_cache")
        assert [hits_of_another() > 0 for _ in range(2)] == [False, True]
        stage.sync()
        assert [hits_of_another() > 0 for _ in range(2)] == [False, True]
