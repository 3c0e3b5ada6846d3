"""The main example goes on, after a death and from a checkpoint, with the same curve to the last bit."""

import json
import signal
from dataclasses import asdict, replace

import pytest
from grpo_runs import MODULES, Run, tiny_driver
from grpo_stage import CONFIG, a_stage

from grpo.checkpoint import FILE
from grpo.deaths import Deaths


@pytest.fixture
def stage(local_ray, tmp_path):
    with a_stage(tmp_path) as stage:
        yield stage


def curve(history):
    """All that a seed decides."""
    steps = [{**asdict(step), "seconds": None} for step in history.steps]
    return [*steps, *map(asdict, history.evaluations)]


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
    for drawn in ("generate", "restart", "weight update", "environments"):
        assert f'"{drawn}' in page, drawn
    assert json.loads((out / "timeline.json").read_text())["traceEvents"]
