"""The main example goes on, after a death and from a checkpoint, with the same curve to the last bit."""

import json
import os
import shutil
import signal
import sys
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import ray
from grpo_runs import EXAMPLE, Run, tiny_driver

sys.path.insert(0, str(EXAMPLE))

from grpo import task, verification
from grpo.checkpoint import FILE, Checkpoint, settings_of
from grpo.config import GrpoConfig, ModelConfig, RunConfig, WarmupConfig
from grpo.crew import Crew
from grpo.deaths import Deaths
from grpo.loop import GrpoLoop
from grpo.workers import LEARN, SAMPLE, WorkerKind, start_groups
from raycrew.cluster_core import RayVirtualCluster
from raycrew.tensor_transport import WeightDirectory

CONFIG = RunConfig(
    digits=2,
    model=ModelConfig(hidden=32),
    warmup=WarmupConfig(steps=60, batch_size=64, learning_rate=2e-2),
    grpo=GrpoConfig(steps=4, prompts_per_step=8, samples_per_prompt=8, evaluate_every=2, held_out_prompts=20),
)
MODULES = os.pathsep.join(map(str, (EXAMPLE, Path(__file__).parent, os.environ.get("PYTHONPATH", ""))))
POLICY = WorkerKind("policy", "grpo_tiny.TinyPolicy", None, {"PYTHONPATH": MODULES}, LEARN)
GENERATOR = WorkerKind("tiny", "grpo_tiny.TinyGenerator", None, {"PYTHONPATH": MODULES}, SAMPLE)
KINDS = {"policy": POLICY, "generator": GENERATOR}


class Stage:
    """A cluster on which the example runs, and where its checkpoints are."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder, self.told = cluster, folder, []

    @contextmanager
    def crew(self, config=CONFIG, kill=(), deaths=Deaths):
        deaths = deaths(dict(kill), self.told.append)
        with WeightDirectory.start() as directory:
            how = {"config": config, "directory": directory, "deaths": deaths}
            with start_groups(self.cluster, KINDS, **how) as (policy, generators):
                yield Crew(config, policy, generators, directory, deaths)

    def run(self, crew, name, *, resume_from=None, keep_step=None):
        """A run's history; its checkpoint after `keep_step` is copied to where another run finds it."""
        folder = self.folder / name
        loop = GrpoLoop(crew.config, crew, folder, settings_of(crew.config), checkpoint_every=2)
        if resume_from is None:
            loop.warm_up(lambda *_: None)
        else:
            loop.restore(Checkpoint.load(self.folder / resume_from))

        def keep():
            if loop.step == keep_step:
                shutil.copytree(folder, self.folder / f"{name} {keep_step}", dirs_exist_ok=True)

        return loop.run(keep)


def curve(history):
    """All that a seed decides."""
    steps = [{**asdict(step), "seconds": None} for step in history.steps]
    return [*steps, *map(asdict, history.evaluations)]


@pytest.fixture
def stage(request, local_ray, tmp_path):
    for module in (task, verification):  # what verifies runs in processes that do not know the example
        ray.cloudpickle.register_pickle_by_value(module)
        request.addfinalizer(partial(ray.cloudpickle.unregister_pickle_by_value, module))
    with RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=2) as cluster:
        yield Stage(cluster, tmp_path)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.hostile
def test_killed_workers_and_what_is_taken_from_a_checkpoint_change_nothing_of_the_curve(stage):
    with stage.crew(kill={"generator": 2, "policy": 4}) as crew:
        whole = stage.run(crew, "whole", keep_step=2)
        resumed = stage.run(crew, "resumed", resume_from="whole 2")  # with nobody killed
    assert curve(resumed) == curve(whole)
    assert [step.weight_version for step in whole.steps] == [1, 2, 3, 4]
    assert [evaluation.step for evaluation in whole.evaluations] == [0, 2, 4]
    assert 0 < whole.steps[-1].reward < 1
    assert whole.steps[1].kl > 0 < whole.steps[-1].kl
    assert all(step.logprob_difference < 1e-4 for step in resumed.steps)
    assert [event.worker for event in resumed.events] == ["generator 0", "policy 0"]
    generator, policy = stage.told
    assert generator.startswith("step 2: generator 0 (process ")
    assert "was killed during generate; restarted in " in generator
    assert generator.endswith("s, caught up to version 2")
    assert policy.startswith("step 4: policy 0 (process ")
    assert policy.endswith("s, caught up to round 4 from the other ranks")
    assert [file.name for file in (stage.folder / "resumed").iterdir()] == [FILE]


class AllDie(Deaths):
    """Kills the whole group in place of one rank."""

    def victims(self, group):
        return group.call("pid").get_results()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.hostile
def test_where_no_rank_of_the_policy_survives_the_last_checkpoint_does(stage):
    with stage.crew(kill={"policy": 4}, deaths=AllDie) as crew:
        killed = stage.run(crew, "killed", keep_step=2)
    with stage.crew() as crew:
        resumed = stage.run(crew, "resumed", resume_from="killed 2")
    assert curve(killed) == curve(resumed)
    assert sorted(event.worker for event in killed.events) == ["policy 0", "policy 1"]
    assert all("gone back to the checkpoint of step 2" in line for line in stage.told)


@pytest.mark.long
@pytest.mark.slow
def test_a_resumed_control_keeps_the_weights_that_the_warm_up_ended_with(stage):
    config = replace(CONFIG, synchronise=False)
    with stage.crew(config) as crew:
        whole = stage.run(crew, "whole", keep_step=2)
    with stage.crew(config) as crew:
        resumed = stage.run(crew, "resumed", resume_from="whole 2")
    assert curve(resumed) == curve(whole)
    assert {step.weight_version for step in whole.steps} == {1}
    assert whole.steps[-1].logprob_difference > 1e-4


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.hostile
@pytest.mark.timeout(600)
def test_interrupt_in_an_update_leaves_nothing_behind_but_what_to_go_on_from(tmp_path):
    script, out = tiny_driver(tmp_path), tmp_path / "out"
    options = ("--quick", "--steps", "3", "--checkpoint-every", "1", "--output", out)
    run = Run(*options, script=script, env={"PYTHONPATH": MODULES, "STALL": str(tmp_path / "stalled")})
    run.wait_for(tmp_path / "stalled")
    run.process.send_signal(signal.SIGINT)
    (tmp_path / "go").touch()
    code, output, err = run.finish()
    assert code == 130, output + err
    assert err.splitlines()[-1] == "interrupted"
    assert [file.name for file in out.rglob("*")] == ["checkpoint", "latest.pt"]

    again = (*options, "--resume", "--timeline", "--kill-generator-at", "2", "--kill-trainer-at", "3")
    code, output, err = Run(*again, script=script, env={"PYTHONPATH": MODULES}).finish()
    assert code == 0, output + err
    assert "resumed at step 1, with weights of version 2" in output
    assert "caught up to version 2" in output
    assert "caught up to round 3 from the other ranks" in output
    content = json.loads((out / "metrics.json").read_text())
    assert [step["weight_version"] for step in content["steps"]] == [1, 2, 3]
    assert [event["worker"] for event in content["events"]] == ["generator 0", "policy 0"]
    page = (out / "timeline.html").read_text()
    assert "generate" in page
    assert "restart" in page
    assert json.loads((out / "timeline.json").read_text())["traceEvents"]
