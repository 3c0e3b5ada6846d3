"""The main example where both groups share a device in turns, and how devices are shared out."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from grpo_in_process import Generator, Policy, crew_in_process
from grpo_stage import CONFIG, a_stage

from grpo import loop, policy
from grpo.crew import Crew
from grpo.layout import Layout
from grpo.loop import GrpoLoop
from grpo.options import parse_options
from grpo.workers import MEMBERS
from raycrew.worker_groups import PhaseManager


class TestLayout:
    def test_cpu_workers_are_both_awake_on_the_same_bundles(self):
        layout = Layout.of(0)
        assert (layout.policy, layout.generators) == (2, 2)
        assert (layout.has_gpus, layout.is_shared, layout.takes_turns) == (False, True, False)

    def test_one_gpu_is_for_both_in_turns(self):
        layout = Layout.of(1)
        assert (layout.policy, layout.generators) == (1, 1)
        assert (layout.has_gpus, layout.is_shared, layout.takes_turns) == (True, True, True)
        assert (layout.gpus, Layout.of(0).gpus) == (1, 0)

    @pytest.mark.parametrize(("gpus", "policy", "generators"), [(2, 1, 1), (3, 1, 2), (8, 4, 4)])
    def test_of_several_each_group_has_its_own(self, gpus, policy, generators):
        layout = Layout.of(gpus)
        assert (layout.policy, layout.generators) == (policy, generators)
        assert (layout.is_shared, layout.takes_turns, layout.gpus) == (False, False, gpus)

    def test_nobody_goes_on_meanwhile_on_one_gpu(self, capsys):
        with pytest.raises(SystemExit):
            parse_options(["--async", "1", "--gpus", "1"])
        assert "--gpus 2" in capsys.readouterr().err
        assert parse_options(["--async", "1", "--gpus", "2"]).gpus == 2


class Sleeping:
    """Notes what becomes of it."""

    is_awake, seen = True, []

    def note(self, what):
        assert self.is_awake, what
        self.seen.append(what)

    def sleep(self):
        type(self).is_awake = False

    def wake(self):
        type(self).is_awake = True


class SleepingGenerator(Sleeping, Generator):
    def wake(self):
        assert not SleepingPolicy.is_awake
        self.receiver.pull()
        super().wake()

    def generate(self, batch, sampling):
        self.note("generate")
        return Generator.generate(self, batch, sampling)


class SleepingPolicy(Sleeping, Policy):
    def wake(self):
        assert not SleepingGenerator.is_awake
        super().wake()

    def publish_weights(self):
        self.note("publish")
        return Policy.publish_weights(self)

    def train(self, batch, step):
        self.note("train")
        return Policy.train(self, batch, step)


def test_a_round_has_whoever_is_at_work_awake_and_nobody_else(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "rewards", lambda prompts, _: [float(at % 2) for at in range(len(prompts))])
    config = replace(CONFIG, grpo=replace(CONFIG.grpo, steps=2, evaluate_every=2))
    phases = PhaseManager(*MEMBERS, look_s=None)
    with crew_in_process(config, SleepingPolicy, SleepingGenerator) as both:
        SleepingPolicy.is_awake = SleepingGenerator.is_awake = False
        with phases.turn("policy"):
            phases.add("policy", both.policy)
        with phases.turn("generator"):
            phases.add("generator", both.generators.group)
        crew = Crew(config, both.policy, both.generators, both.directory, both.deaths, phases)
        history = GrpoLoop(config, crew, tmp_path, {}, checkpoint_every=None).run(lambda: None)
    assert [step.weight_version for step in history.steps] == [1, 2]
    assert set(Sleeping.seen) == {"generate", "publish", "train"}


def test_a_policy_that_could_not_be_woken_wakes_when_it_is_asked_again(monkeypatch):
    monkeypatch.setattr(policy, "DistributedDataParallel", lambda model: SimpleNamespace(module=model))
    worker, is_full = object.__new__(policy.PolicyWorker), [True, False]

    def move(_device):
        if is_full.pop(0):
            raise RuntimeError("the device has no room")

    worker.learner = SimpleNamespace(model="a model", move=move)
    worker.device, worker.replica, worker.is_asleep = "cpu", None, True
    with pytest.raises(RuntimeError, match="no room"):
        worker.onload()
    worker.onload()
    assert worker.replica.module == "a model"
    worker.onload()
    assert not is_full, "who is awake has nothing to do"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.hostile
def test_turns_and_deaths_in_them_change_nothing_of_the_curve(local_ray, tmp_path):
    with a_stage(tmp_path) as stage:
        with stage.crew() as crew:
            awake = stage.run(crew, "awake")
        with stage.crew(kill={"generator": 2, "policy": 3}, phases=PhaseManager(*MEMBERS)) as crew:
            turns = stage.run(crew, "turns")
            report = crew.phases.report()
    assert curve(turns) == curve(awake)
    assert [event.worker for event in turns.events] == ["generator 0", "policy 0"]
    assert {name for name, use in report.phases.items() if use.times} >= set(MEMBERS)


def curve(history):
    """All that a seed decides."""
    steps = [{**asdict(step), "seconds": None} for step in history.steps]
    return [*steps, *map(asdict, history.evaluations)]
