"""Generation workers: the plain one in this process and on Ray, and what the driver's side does."""

import asyncio
import importlib
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from generation_conformance import Conformance, check_what_waits_for_room
from generation_echo import MODEL as ECHO
from generation_echo import AdaptedWorker, EchoTrainer
from generation_stage import END, EXAMPLE, MODEL, Shelf, batch_of, group_stage, local_stage, rows_of

from generation import EngineOptions, RefusedError, Sampling, start_generators
from generation.calls import Asked, requests_of, samples_of
from generation.engine import WeightSource
from generation.group import WORKERS
from generation.models import build_model, read_config
from generation.prompts import Limits, read_prompts
from generation.samples import Sample
from generation.transformers_engine import TransformersEngine
from generation.transformers_worker import TransformersWorker
from generation.vllm_worker import COMPILER, without_compiler
from raycrew.cluster_core import BundleSpec
from raycrew.cluster_core.testing import FakeCluster, connected
from raycrew.tensor_transport import (
    BatchedDataDict,
    StaleWeightsError,
    WeightDirectory,
    WeightPublisher,
    WeightUpdateError,
)


class TestTransformers(Conformance):
    @pytest.fixture(scope="class")
    @classmethod
    def stage(cls):
        with local_stage(TransformersWorker) as made:
            yield made

    def test_what_it_can_not_do_is_refused_by_name(self, stage):
        assert "no adapters" in stage.call("explain")
        with stage.refused(RefusedError, "no LoRA adapters"):
            stage.call("load_adapter", "tuned", "/nowhere")
        for options in ({"max_adapters": 1}, {"tensor_parallel": 2}, {"more": {"x": 1}}):
            with pytest.raises(RefusedError, match="transformers engine"):
                TransformersWorker(EngineOptions(MODEL, **options))


@pytest.mark.parametrize(
    ("named", "ends"), [(None, {END}), (END, {END}), ([END, 9], {END, 9}), ([9, 11], {END, 9, 11})]
)
def test_samples_end_with_what_a_models_folder_names_for_generation_too(tmp_path, named, ends):
    build_model(EngineOptions(MODEL), read_config(EngineOptions(MODEL))).save_pretrained(tmp_path)
    says = tmp_path / "generation_config.json"
    says.unlink(missing_ok=True) if named is None else says.write_text(json.dumps({"eos_token_id": named}))
    with local_stage(TransformersWorker, str(tmp_path)) as stage:
        rows = rows_of(stage.generate(batch_of(), {"n": 16, "max_tokens": 120, "seed": 0}))
    assert {row[2][-1] for row in rows if row[5] == "stop"} == ends
    assert not {token for row in rows for token in row[2][:-1]} & ends


@pytest.mark.parametrize("made", [torch.tensor, np.array, list])
def test_padding_is_no_part_of_a_prompt_whatever_the_rows_are(made):
    batch = {"prompt_ids": made([[5, 6, 0, 0], [7, 8, 9, 5]]), "prompt_lengths": made([2, 4])}
    found = read_prompts(BatchedDataDict(batch), Limits(61, 512))
    assert [prompt.tokens for prompt in found] == [(5, 6), (7, 8, 9, 5)]


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("instead", "says"),
    [
        ({EMBEDDING: torch.ones(1, 64)}, r"embed_tokens.weight is \[1, 64\], and \[61, 64\] in the model"),
        ({"model.norm.weight": torch.tensor([7.0])}, r"model.norm.weight is \[1\], and \[64\]"),
        (
            {EMBEDDING: torch.ones(61, 64), HEAD: torch.zeros(61, 64)},
            "one tensor here, and two in the update",
        ),
    ],
)
def test_a_first_version_that_is_of_another_model_is_refused_where_tensors_are_tied(instead, says):
    """Nobody compares it before it is loaded there, as these may have one name or two."""
    engine = TransformersEngine(EngineOptions({**MODEL, "tie_word_embeddings": True}), 0)
    weights = {name: tensor.clone() for name, tensor in engine.model.named_parameters()}
    directory, store = WeightDirectory.local(), Shelf()
    publisher = WeightPublisher(directory=directory, store=store)
    receiver = engine.receiver(WeightSource(directory, store), lambda load, *args: load(*args))
    publisher.publish({**weights, **instead})
    with pytest.raises(WeightUpdateError, match=says):
        receiver.pull()
    with pytest.raises(StaleWeightsError):
        receiver.require()
    publisher.publish({**weights, **({HEAD: weights[EMBEDDING].clone()} if HEAD in instead else {})})
    assert receiver.pull().version == receiver.require() == 2


def test_what_an_engine_has_no_room_for_waits():
    check_what_waits_for_room(TransformersWorker)


@pytest.mark.long
class TestTransformersOnRay(Conformance):
    @pytest.fixture(scope="class")
    @classmethod
    def stage(cls, local_ray_session):
        with connected(local_ray_session), group_stage("transformers", name_prefix="plain") as made:
            yield made


@pytest.mark.parametrize("resources", [{}, {"fast_disk": 1.0}])
def test_the_executor_ray_is_refused_on_cpus_before_an_engine_starts(resources):
    cluster = FakeCluster([2], bundle_specs=BundleSpec(resources=resources))
    with pytest.raises(RefusedError, match="no executor 'ray' on CPUs"):
        start_generators(cluster, "vllm", EngineOptions(MODEL, executor="ray"))


@pytest.mark.parametrize(
    ("driver", "worker"),
    [("generation", name) for name in WORKERS.values()] + [("grpo.workers", "grpo.policy.PolicyWorker")],
)
def test_a_driver_has_the_classes_of_its_workers_and_neither_vllm_nor_transformers(driver, worker):
    """So that a group knows what they are like without a process that imports those."""
    module, _, name = worker.rpartition(".")
    code = (
        f"import sys, {driver}; held = hasattr(sys.modules['{module}'], '{name}')\n"
        "print(held, [m for m in ('vllm', 'transformers') if m in sys.modules])"
    )
    path = os.pathsep.join([str(EXAMPLE), str(EXAMPLE.with_name("grpo")), os.environ.get("PYTHONPATH", "")])
    told = {"env": {**os.environ, "PYTHONPATH": path}, "capture_output": True, "text": True, "check": True}
    assert subprocess.run([sys.executable, "-c", code], **told).stdout.strip() == "True []"


class AtOnce:
    """An engine's loop all of whose samples end in one step."""

    def submit(self, requests, sink, listener):
        def step():
            for number, request in enumerate(requests):
                at = request.prompt_index, request.sample_index
                sink(request, Sample(*at, [number], [0.0], [0], "stop"))

        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        done = Future()
        done.set_result(None)
        return done


def test_the_event_loop_is_woken_once_for_all_samples_that_end_in_a_step():
    async def told():
        loop, woken = asyncio.get_running_loop(), []
        wake = loop.call_soon_threadsafe

        def noted(*args, **kwargs):
            if threading.current_thread() is not threading.main_thread():
                woken.append(args)
            return wake(*args, **kwargs)

        loop.call_soon_threadsafe = noted
        asked = Asked({"prompt_ids": [[5], [6]]}, Sampling(n=16), None, None)
        samples = [found async for _, found in samples_of(AtOnce(), requests_of(asked, Limits(10, 20)))]
        return len(woken), [(found.prompt_index, list(found.tokens)) for found in samples]

    assert asyncio.run(told()) == (1, [(at // 16, [at]) for at in range(32)])


@pytest.mark.parametrize("change", ["load_adapter", "unload_adapter"])
def test_samples_that_are_under_way_with_an_adapter_get_no_tokens_of_another_in_its_place(tmp_path, change):
    folder, long = tmp_path / "adapter", {"max_tokens": 500}
    folder.write_text("1")
    with local_stage(AdaptedWorker, ECHO, EchoTrainer) as stage:
        stage.call("load_adapter", "tuned", str(folder))
        under_way, others = stage.begin(batch_of(), long, adapter="tuned"), stage.begin(batch_of(), long)
        stage.wait_for_tokens(20)
        stage.call("pause", "continue")
        waiting = stage.begin(batch_of(), {"max_tokens": 3}, adapter="tuned")
        folder.write_text("2")
        stage.call(change, "tuned", *([str(folder)] if change == "load_adapter" else []))
        for _, _, tokens, *_, why in rows_of(under_way.result(60)):
            assert (why, set(tokens)) == ("abort", {1})
        stage.call("resume")
        if change == "load_adapter":
            assert {tuple(row[2]) for row in rows_of(waiting.result(60))} == {(2, 2, 2)}
        else:
            with stage.refused(RefusedError, "no adapter 'tuned' is loaded"):
                waiting.result(60)
        assert {row[5] for row in rows_of(others.result(60))} == {"length"}, "those of no adapter go on"


def test_torchs_compiler_is_kept_away_only_where_nothing_is_compiled_and_only_for_a_while(monkeypatch):
    monkeypatch.delitem(sys.modules, COMPILER, raising=False)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    with without_compiler():
        assert COMPILER not in sys.modules
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with without_compiler(), pytest.raises(ImportError, match="halted"):
        importlib.import_module(COMPILER)
    assert COMPILER not in sys.modules
