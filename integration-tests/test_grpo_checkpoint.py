"""What the main example writes to go on from, what it refuses, and what it tells of workers that died."""

import errno
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpo_runs  # noqa: F401 - makes the example importable
import grpo_tiny_model
import numpy as np
import pytest
import torch
from grpo_in_process import Policy, crew_in_process
from grpo_stage import CONFIG
from rich.console import Console

from grpo import checkpoint as checkpoints
from grpo import learner as learners
from grpo import loop
from grpo.checkpoint import FILE, Checkpoint, settings_of
from grpo.config import ModelConfig, RunConfig
from grpo.deaths import Deaths
from grpo.errors import ExampleError
from grpo.history import Evaluation, Event, History, StepRecord
from grpo.main import run
from grpo.options import parse_options
from grpo.workers import POLICY
from raycrew.worker_groups import WorkerFailureError


def files_in(folder):
    return [file.name for file in folder.iterdir()]


def record(step):
    seconds = {"generate": 0.1 / 3, "verify": 0.0, "train": 1e-9, "sync": 2.0}
    return StepRecord(step, 1 / 3, 0.2, -0.1, 0.0, 1e-6, step, 100, seconds)


def checkpoint(steps=2, **settings):
    history = History([record(step) for step in range(1, steps + 1)], [Evaluation(0, 1 / 7)])
    history.events.append(Event(1, "generator 0", 2.5, "step 1: it died"))
    policy = {
        "model": {"w": torch.randn(3, 2)},
        "reference": None,
        "optimizer": {"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": [{"betas": (0.9, 0.999)}]},
        "random": {0: {"python": random.Random(3).getstate(), "torch": torch.get_rng_state(), "cuda": None}},
    }
    return Checkpoint(settings_of(RunConfig(), gpus=0, **settings), history, 3, policy)


def test_what_is_loaded_is_what_was_saved(tmp_path):
    saved = checkpoint()
    saved.save(tmp_path / "checkpoint")
    checkpoint(steps=1).save(tmp_path / "other")
    loaded = Checkpoint.load(tmp_path / "checkpoint")
    assert (loaded.history, loaded.version, loaded.step) == (saved.history, 3, 2)
    assert loaded.settings == saved.settings
    assert torch.equal(loaded.policy["model"]["w"], saved.policy["model"]["w"])
    assert loaded.policy["optimizer"]["param_groups"] == saved.policy["optimizer"]["param_groups"]
    rng = random.Random()
    rng.setstate(loaded.policy["random"][0]["python"])
    assert rng.random() == random.Random(3).random()
    checkpoint(steps=5).save(tmp_path / "checkpoint")
    assert Checkpoint.load(tmp_path / "checkpoint").step == 5
    assert files_in(tmp_path / "checkpoint") == [FILE]


def test_a_run_of_another_configuration_is_refused_by_what_differs():
    config = RunConfig()
    found = checkpoint(generator="vLLM")
    longer = replace(config, grpo=replace(config.grpo, steps=1000))
    found.check(settings_of(longer, gpus=0))
    other = replace(config, seed=4, grpo=replace(config.grpo, kl_weight=0.5))
    with pytest.raises(ExampleError) as refused:
        found.check(settings_of(other, gpus=2, generator="vLLM"))
    message = str(refused.value)
    for difference in (
        "seed is 4, and was 0",
        "grpo.kl_weight is 0.5, and was 0.001",
        "gpus is 2, and was 0",
    ):
        assert difference in message
    assert "generator" not in message
    with pytest.raises(ExampleError, match="generator is transformers, and was vLLM"):
        found.check({"generator": "transformers"})


@pytest.mark.hostile
@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_checkpoint_is_refused(tmp_path, damage):
    checkpoint().save(tmp_path)
    content = bytearray((tmp_path / FILE).read_bytes())
    content[len(content) // 2] ^= 1
    damaged = {"cut": content[:-100], "changed": content, "empty": b""}[damage]
    (tmp_path / FILE).write_bytes(damaged)
    with pytest.raises(ExampleError, match="damaged"):
        Checkpoint.load(tmp_path)


def test_no_checkpoint_is_said():
    with pytest.raises(ExampleError, match=r"no checkpoint .*latest\.pt: start without --resume"):
        Checkpoint.load(Path("/nowhere"))


@pytest.mark.hostile
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    checkpoint(steps=1).save(tmp_path)

    def full(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(ExampleError, match=r"cannot write the checkpoint .*No space left"):
            checkpoint(steps=2).save(tmp_path)
    assert Checkpoint.load(tmp_path).step == 1
    assert files_in(tmp_path) == [FILE]


def save_until(folder, line):
    """Save in a process that is killed before so many lines of what writes have run; whether it was."""
    if not (child := os.fork()):
        left = iter(range(line))

        def trace(frame, event, _arg):
            if frame.f_code.co_filename != checkpoints.__file__:
                return None
            if event == "line" and next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        checkpoints._write(folder / FILE, b"new")
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.hostile
def test_whoever_is_killed_between_two_lines_leaves_one_checkpoint_or_the_other(tmp_path):
    checkpoints._write(tmp_path / FILE, b"old")
    found = []
    while save_until(tmp_path, len(found)):
        found.append((tmp_path / FILE).read_bytes())
    assert found == sorted(found, reverse=True), "once the new one is there it stays"
    assert {*found} == {b"old", b"new"}
    assert files_in(tmp_path) == [FILE], "the one that was whole has left nothing of the others"


def test_going_back_forgets_what_was_measured_and_not_what_happened():
    history, earlier = checkpoint(steps=4).history, checkpoint(steps=2).history
    history.events.append(Event(4, "policy 0", 1.0, "step 4: it died"))
    events = history.events
    history.go_back_to(earlier)
    assert history.steps == earlier.steps
    assert [event.step for event in history.events] == [1, 4]
    assert history.events is events


def take_a_step(learner):
    target = learner.rng.random() + torch.rand(()) + np.random.rand()
    learner.step((learner.model.head.weight.sum() - target) ** 2)


def test_a_run_that_is_over_where_it_was_stopped_is_measured_there(monkeypatch, tmp_path):
    monkeypatch.setattr(loop, "rewards", lambda prompts, _: [1.0] * len(prompts))
    config = replace(CONFIG, grpo=replace(CONFIG.grpo, steps=2))
    stopped = replace(checkpoint(2), policy={})
    with crew_in_process(config, Resumed) as crew:
        run = loop.GrpoLoop(config, crew, tmp_path, {}, checkpoint_every=None)
        run.restore(stopped)
        history = run.run(lambda: None)
    assert [step.step for step in history.steps] == [1, 2]
    assert history.evaluations == [*stopped.history.evaluations, Evaluation(2, 1.0)]


class Resumed(Policy):
    """Has nothing to restore."""

    def restore(self, state):
        assert state == {}


def test_a_learner_goes_on_from_a_copy_which_learning_does_not_change(monkeypatch):
    monkeypatch.setattr(learners, "build_model", grpo_tiny_model.build_model)
    config = RunConfig(model=ModelConfig(hidden=4))
    first = learners.Learner(config, 0, torch.device("cpu"))
    take_a_step(first)
    first.freeze()
    take_a_step(first)
    copy, at = first.state(), first.random_state()
    for _ in range(2):
        take_a_step(first)
    wanted = first.state()
    for _ in range(2):  # the second time from the same copy
        second = learners.Learner(config, 1, torch.device("cpu"))
        second.load(copy)
        second.load_random_state(at)
        for _ in range(2):
            take_a_step(second)
        torch.testing.assert_close(second.state(), wanted, rtol=0, atol=0)
    assert not torch.equal(copy["model"]["head.weight"], wanted["model"]["head.weight"])
    assert not torch.equal(copy["reference"]["head.weight"], copy["model"]["head.weight"])


class Group:
    """A group whose rank 0 is a process of ours."""

    name = "generator"

    def __init__(self, pid):
        self.pid = pid

    def on(self, *, ranks):
        assert ranks == [0]
        return self

    def call(self, method):
        return SimpleNamespace(get_results=lambda: [getattr(self, method)])


def test_the_worker_is_killed_in_its_round_and_once_and_told_of_when_it_is_back():
    told = []
    clock = iter([10.0, 12.5]).__next__
    deaths = Deaths({"generator": 2, "policy": 9}, told.append, clock)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        group = Group(victim.pid)
        with deaths.strike(group, 1):
            pass
        assert victim.poll() is None
        with deaths.strike(group, 2):
            assert victim.poll() is None
        assert victim.wait(timeout=60) == -signal.SIGKILL
    with deaths.strike(group, 2):  # there is nobody to kill: it would raise
        pass
    known = {"rank": 0, "group_name": "generator", "method": "generate", "pid": victim.pid}
    deaths.note(WorkerFailureError("it died", **known))
    assert deaths.count == 1
    deaths.tell(2, "caught up to version 7")
    deaths.tell(3, "nothing is told twice")
    what = f"step 2: generator 0 (process {victim.pid}) was killed during generate; restarted in 2.5 s, "
    assert told == [what + "caught up to version 7"]
    assert deaths.events == [Event(2, "generator 0", 2.5, told[0])]


def test_options_of_going_on():
    options = parse_options(
        ["--kill-generator-at", "20", "--kill-trainer-at", "30", "--resume", "--timeline"]
    )
    assert options.kill == {"generator": 20, "policy": 30}
    assert (options.resume, options.timeline, options.checkpoint_every) == (True, True, 5)
    plain = parse_options(["--checkpoint-every", "2"])
    assert (plain.kill, plain.resume, plain.timeline, plain.checkpoint_every) == ({}, False, False, 2)
    for bad in (
        ["--quick", "--kill-trainer-at", "11"],
        ["--kill-generator-at", "0"],
        ["--checkpoint-every", "0"],
    ):
        with pytest.raises(SystemExit, match="2"):
            parse_options(bad)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--seed", "5"], "seed is 5, and was 0"),
        (["--steps", "1"], "at step 2, beyond the 1 that"),
        (["--gpus", "1"], "gpus is 1, and was 0"),
    ],
)
def test_another_run_is_refused_before_anything_starts(tmp_path, options, wanted):
    settings = settings_of(RunConfig(), workers=2, gpus=0)
    replace(checkpoint(), settings=settings).save(tmp_path / "checkpoint")
    with pytest.raises(ExampleError, match=wanted):
        run(parse_options(["--resume", "--output", str(tmp_path), *options]), POLICY, Console())
