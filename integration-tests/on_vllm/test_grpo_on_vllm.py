"""The main example with vLLM: generation goes on while the trainer trains."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]

from grpo_runs import MODULES  # noqa: E402
from grpo_stage import CONFIG, a_stage  # noqa: E402

from grpo.asynchronous import AsyncGrpoLoop  # noqa: E402
from grpo.config import ModelConfig, WarmupConfig  # noqa: E402
from grpo.workers import POLICY, VLLM_CPU  # noqa: E402

BOUND, STEPS = 2, 6


def test_what_was_sampled_while_the_trainer_trained_is_learnt_from_and_not_too_old(local_ray, tmp_path):
    config = replace(
        CONFIG,
        model=ModelConfig(),
        warmup=WarmupConfig(steps=20),
        grpo=replace(CONFIG.grpo, steps=STEPS, evaluate_every=3),
    )
    kinds = [  # all is in this environment
        replace(kind, project=None, env_vars={**kind.env_vars, "PYTHONPATH": MODULES})
        for kind in (POLICY, VLLM_CPU)
    ]
    with a_stage(tmp_path) as stage, stage.crew(config, kinds=kinds) as crew:
        assert "a vLLM engine" in crew.generators.call("explain")[0]
        loop = AsyncGrpoLoop(config, crew, BOUND)
        crew.warm_up(loop.train_prompts, lambda *_: None)
        steps = loop.run(lambda: None).steps
        versions = [found.weight_version for found in crew.generators.metrics()]
    ages = [age for step in steps for age in step.staleness]
    assert len(ages) == STEPS * config.grpo.prompts_per_step == loop.counts()["trained"]
    assert 0 < max(ages) <= BOUND, "some were sampled meanwhile"
    assert set(loop.trained.values()) == {1}
    assert steps[0].logprob_difference < 1e-4, "sampled with the very weights that the trainer has"
    assert steps[-1].logprob_difference > 1e-4
    assert versions == [STEPS + 1] * 2
    assert [evaluation.step for evaluation in loop.history.evaluations] == [0, 3, 6]
