"""The main example with generation going on while the trainer trains: ages, counts, and what is refused."""

import asyncio
import itertools
import json
import os
import signal
import threading
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from grpo_in_process import GREEDILY, SAMPLED, STORE, Generator, Policy, crew_in_process
from grpo_runs import MODULES, Run, tiny_driver
from grpo_stage import CONFIG, a_stage
from grpo_tiny_model import build_model
from hypothesis import given
from hypothesis import strategies as st

from grpo import asynchronous, learner, policy, vocabulary
from grpo.admission import Admission
from grpo.asynchronous import AsyncGrpoLoop
from grpo.comparison import write_comparison
from grpo.crew import Crew
from grpo.history import OVERLAPPED, PHASES, Evaluation, History, StepRecord
from grpo.occupancy import Occupancy
from grpo.options import parse_options
from grpo.pace import Stopwatch, in_turns, overlapped
from grpo.startup import StartClock
from raycrew.tensor_transport import BatchedDataDict, RaggedTensor, WeightDirectory, WeightReceiver
from raycrew.worker_groups import timeline


@pytest.fixture
def stage(local_ray, tmp_path):
    with a_stage(tmp_path) as stage:
        yield stage


def config_of(steps):
    return replace(CONFIG, grpo=replace(CONFIG.grpo, steps=steps, evaluate_every=4))


def run_overlapped(crew, bound, update=lambda _: None):
    """A loop that has run from the warm-up to its end."""
    loop = AsyncGrpoLoop(crew.config, crew, bound)
    crew.warm_up(loop.train_prompts, lambda *_: None)
    loop.run(lambda: update(loop))
    return loop


def assert_each_prompt_counts_once_and_none_is_too_old(loop, bound):
    steps, counts = loop.history.steps, loop.counts()
    assert [step.step for step in steps] == list(range(1, 9))
    ages = [age for step in steps for age in step.staleness]
    assert len(ages) == 64
    assert max(ages) <= bound
    assert set(loop.trained.values()) == {1}
    assert len(loop.trained) == counts["trained"] == 64
    assert counts["produced"] == counts["trained"] + counts["dropped as too old"] + counts["left over"]
    assert counts["produced"] == loop.admission.asked
    assert [evaluation.step for evaluation in loop.history.evaluations] == [0, 4, 8]


def verified_here(monkeypatch):
    monkeypatch.setattr(
        asynchronous, "rewards", lambda prompts, texts: [float(text == SAMPLED) for text in texts]
    )


def test_updates_are_drawn_in_turns_and_overlapped():
    with crew_in_process(CONFIG) as crew, timeline() as run:
        crew.on_update = run.add
        crew.synchronise()
        asyncio.run(crew.share(asyncio.Event()))
    events = run.trace()["traceEvents"]
    assert [one["name"] for one in events if one["args"].get("kind") == "whole"] == ["weight update"] * 2
    assert {"load"} <= {one["name"] for one in events}


def test_parts_of_the_start_are_drawn():
    clock = StartClock()
    with timeline() as run:
        clock.draw = run.span
        with clock.phase("environments"):
            pass
    assert "environments" in clock.seconds
    assert "environments" in [one["name"] for one in run.trace()["traceEvents"]]


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_each_prompt_is_learnt_from_once_and_none_is_too_old(monkeypatch, bound):
    verified_here(monkeypatch)
    updates = []
    with crew_in_process(config_of(steps=8)) as crew:
        loop = AsyncGrpoLoop(crew.config, crew, bound)
        loop.run(lambda: updates.append(None))
    assert_each_prompt_counts_once_and_none_is_too_old(loop, bound)
    assert len(updates) == 8 + 3
    assert loop.counts()["left over"] == 0
    assert all(step.reward == 1.0 for step in loop.history.steps)
    assert all(evaluation.reward == 0.0 for evaluation in loop.history.evaluations)  # greedy, here
    assert all(step.step - step.weight_version == max(step.staleness) for step in loop.history.steps)
    assert all(seconds > 0 for seconds in loop.busy_s().values())


def test_what_is_too_old_all_the_same_is_dropped_and_replaced(monkeypatch):
    verified_here(monkeypatch)
    monkeypatch.setattr(asynchronous, "PATIENCE_S", 0.05)
    with crew_in_process(config_of(steps=8)) as crew:
        loop = AsyncGrpoLoop(crew.config, crew, 1)
        loop.admission.bound = 3  # more is begun than can be used in time
        take = loop._next_prompts

        async def take_once_four_rounds_are_there():
            while loop.queue.stats().produced < 4 * 8:
                await asyncio.sleep(0.01)
            return await take()

        monkeypatch.setattr(loop, "_next_prompts", take_once_four_rounds_are_there)
        loop.run(lambda: None)
    assert loop.counts()["dropped as too old"] >= 2 * 8
    assert_each_prompt_counts_once_and_none_is_too_old(loop, 1)


class Counting(Policy):
    """Its weights are the number of rounds that it has learnt from."""

    rounds = 0

    def publish_weights(self):
        return self.publisher.publish({"rounds": torch.tensor([self.rounds])}) if self.learns else None

    def train(self, batch, step):
        self.rounds = step
        return super().train(batch, step)

    def done(self):
        return [CONFIG.warmup.steps, self.rounds]


class Telling(Generator):
    """Has the rounds that its weights had learnt from as log-probabilities, and dies in some updates."""

    dies_in = frozenset()
    deaths, is_told_of = None, True

    def __init__(self, directory):
        self.receiver = WeightReceiver(self.load, store=STORE, directory=directory)
        self.rounds = 0

    def load(self, weights):
        self.rounds = int(dict(weights)["rounds"])

    def prepare_weights(self, version):
        self.live_or_die(version)
        return super().prepare_weights(version)

    def apply_weights(self, version):
        self.live_or_die(version)
        return super().apply_weights(version)

    def live_or_die(self, version):
        if version in self.dies_in:
            self.deaths.count += self.is_told_of
            raise RuntimeError("died in an update")

    def generate(self, batch, sampling):
        found = super().generate(batch, sampling)
        told = torch.full((int(found["output_lengths"].sum()),), float(self.rounds))
        return BatchedDataDict({**found, "logprobs": RaggedTensor(told, found["output_lengths"])})


def test_an_update_that_is_repeated_after_a_death_makes_no_sample_older(monkeypatch):
    verified_here(monkeypatch)
    generator, ages = type("Dying", (Telling,), {"dies_in": {3, 4}}), []
    with crew_in_process(config_of(steps=8), Counting, generator) as crew:
        generator.deaths = crew.deaths
        loop = AsyncGrpoLoop(crew.config, crew, 1)
        take, train = loop._next_prompts, crew.train_async

        async def take_once_the_round_after_it_is_there():
            while loop.queue.stats().produced < min(8 * (len(ages) + 2), 64):
                await asyncio.sleep(0.01)
            return await take()

        async def train_and_note(batch, step):
            rounds = batch["logprobs"].amax(1)[:: CONFIG.grpo.samples_per_prompt].int()
            ages.append([step - 1 - n for n in rounds.tolist()])
            return await train(batch, step)

        monkeypatch.setattr(loop, "_next_prompts", take_once_the_round_after_it_is_there)
        monkeypatch.setattr(crew, "train_async", train_and_note)
        loop.run(lambda: None)
        assert crew.version == 1 + 8 + 2
    assert [step.staleness for step in loop.history.steps] == ages
    assert loop.counts()["dropped as too old"] == 0
    assert_each_prompt_counts_once_and_none_is_too_old(loop, 1)


class Late(Telling):
    """Says how many rounds its weights had learnt from, and dies after the third in the second's update."""

    dies_in, third = frozenset({3}), None

    def live_or_die(self, version):
        assert version not in self.dies_in or self.third.wait(60)
        super().live_or_die(version)

    def generate(self, batch, sampling):
        found = super().generate(batch, sampling)
        if sampling.temperature == 0:
            found["output_ids"].values[:] = torch.tensor([*vocabulary.encode(f"0{self.rounds}")] * batch.size)
        return found


def test_what_a_repeated_update_brings_is_told_by_the_rounds_that_it_had_learnt(monkeypatch):
    config = replace(CONFIG, grpo=replace(CONFIG.grpo, steps=4, evaluate_every=1))
    monkeypatch.setattr(asynchronous, "rewards", lambda prompts, texts: [float(text) for text in texts])
    with crew_in_process(config, Counting, Late) as crew:
        Late.deaths, Late.third = crew.deaths, threading.Event()
        loop, train = AsyncGrpoLoop(config, crew, 1), crew.train_async

        async def train_and_tell(batch, step):
            found = await train(batch, step)
            if step == 3:
                Late.third.set()
            return found

        monkeypatch.setattr(crew, "train_async", train_and_tell)
        loop.run(lambda: None)
        assert crew.version == 1 + 4 + 1
    assert [(one.step, one.reward) for one in loop.history.evaluations] == [(n, n) for n in (0, 1, 3, 4)]
    assert loop.history.steps[-1].staleness == [0] * 8


def share(crew):
    asyncio.run(crew.share(asyncio.Event()))


@pytest.mark.parametrize("update", [Crew.synchronise, share])
def test_an_update_is_repeated_where_a_death_was_told_of_before_it_began(update):
    generator = type("Dying", (Telling,), {"dies_in": {1}, "is_told_of": False})
    with crew_in_process(CONFIG, Counting, generator) as crew:
        generator.deaths = crew.deaths
        crew.deaths.count = 1  # as a call saw it that was under way
        update(crew)
        assert crew.version == 2


def test_what_generators_get_is_never_of_half_a_round(monkeypatch):
    async def shared_meanwhile(crew):
        begun, loaded = asyncio.Event(), asyncio.Event()

        async def half_a_round(batch, step):
            begun.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(loaded.wait(), 0.5)  # as long as this round lasts
            return [{}]

        monkeypatch.setattr(crew, "_ask_policy", half_a_round)
        learning = asyncio.create_task(crew.train_async({}, 1))
        await begun.wait()
        crew.on_update = lambda _: (loaded.set(), done.append(crew.done))
        await crew.share(asyncio.Event())
        await learning

    done = []
    with crew_in_process(CONFIG) as crew:
        asyncio.run(shared_meanwhile(crew))
    assert done == [1]


def test_measurements_are_told_of_in_the_order_of_their_rounds(monkeypatch):
    asked, last_is_asked = itertools.count(), threading.Event()

    def found(prompts, texts):
        if texts[0] == GREEDILY:
            number = next(asked)
            if number == 4:
                last_is_asked.set()
            elif number == 1:  # is there after those of later rounds
                assert last_is_asked.wait(60)
        return [0.0] * len(texts)

    monkeypatch.setattr(asynchronous, "rewards", found)
    config = replace(CONFIG, grpo=replace(CONFIG.grpo, steps=4, evaluate_every=1))
    with crew_in_process(config) as crew:
        steps = [one.step for one in AsyncGrpoLoop(config, crew, 1).run(lambda: None).evaluations]
    assert steps == [0, 1, 2, 3, 4]


def test_what_fails_on_the_way_ends_the_loop_with_its_own_error(monkeypatch):
    def fail(*_):
        raise OSError("the verifier is gone")

    with crew_in_process(config_of(steps=8)) as crew:
        verified_here(monkeypatch)
        loop = AsyncGrpoLoop(crew.config, crew, 1)

        def update():
            monkeypatch.setattr(asynchronous, "rewards", fail)

        with pytest.raises(OSError, match="the verifier is gone"):
            loop.run(update)


@pytest.mark.long
@pytest.mark.slow
def test_what_is_learnt_from_is_what_was_sampled(stage):
    with stage.crew(config_of(steps=8)) as crew:
        loop = run_overlapped(crew, 2)
    assert_each_prompt_counts_once_and_none_is_too_old(loop, 2)
    steps = loop.history.steps
    assert steps[0].logprob_difference < 1e-4  # sampled with the very weights that the trainer has
    assert steps[-1].logprob_difference > 1e-4  # and with older ones
    assert steps[-1].kl > 0


@pytest.fixture
def alone(monkeypatch):
    """A policy of one rank in this process, after its warm-up."""
    monkeypatch.setattr(learner, "build_model", build_model)
    monkeypatch.setattr(policy, "current_worker", lambda: SimpleNamespace(rank=1))  # publishes nothing
    monkeypatch.setattr(policy, "local_device", lambda: torch.device("cpu"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with WeightDirectory.local() as directory:
        made = policy.PolicyWorker(CONFIG, directory)
        made.learner.freeze()
        made.kept["done"] = [CONFIG.warmup.steps, 0]
        made.replica = made.learner.model
        yield made
        made.close()


def test_a_token_counts_by_what_was_recorded_when_it_was_sampled(monkeypatch, alone):
    tokens = torch.arange(24).view(4, 6) % 7
    recorded = -torch.rand(4, 6) - 1
    own = policy.token_logprobs(alone.learner.model, tokens).detach()
    told, loss_of = [], policy.grpo_loss

    def noting(logprobs, proximal, behaviour, *rest, **how):
        told.append((proximal, behaviour, how["truncate"]))
        return loss_of(logprobs, proximal, behaviour, *rest, **how)

    monkeypatch.setattr(policy, "grpo_loss", noting)
    batch = {"tokens": tokens, "mask": torch.ones(4, 6), "logprobs": recorded, "advantages": torch.ones(4)}
    found = alone.train(BatchedDataDict(batch), 1)
    proximal, behaviour = (torch.cat([parts[at] for parts in told]) for at in range(2))
    assert len(told) == CONFIG.grpo.minibatches == 2
    assert {cut for *_, cut in told} == {CONFIG.grpo.truncate} == {2.0}
    assert torch.equal(behaviour, recorded[:, 1:])
    assert torch.allclose(proximal, own), "as it was before the round"
    assert found["logprob_difference"] == pytest.approx(float((own - recorded[:, 1:]).abs().max()))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.hostile
def test_a_generator_that_dies_on_the_way_is_replaced_and_all_is_counted_as_before(stage):
    killed = []

    def kill_once(loop):
        if len(loop.history.steps) == 3 and not killed:
            killed.extend(loop.crew.generators.call("pid")[:1])
            os.kill(killed[0], signal.SIGKILL)

    with stage.crew(config_of(steps=8)) as crew:
        loop = run_overlapped(crew, 2, kill_once)
        after = crew.generators.call("pid")[:1]
    assert killed
    assert killed != after
    assert_each_prompt_counts_once_and_none_is_too_old(loop, 2)
    assert stage.told


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_leaves_both_paces_side_by_side(tmp_path):
    script, out = tiny_driver(tmp_path), tmp_path / "out"
    run = Run(
        "--quick", "--steps", "6", "--async", "1", "--output", out, script=script, env={"PYTHONPATH": MODULES}
    )
    code, output, err = run.finish()
    assert code == 0, output + err
    files = ("reward.png", "metrics.json", "async.png", "async.json")
    assert output.splitlines()[-4:] == [str(out / name) for name in files]
    assert "groups, both at once" in output
    turns, overlap = json.loads((out / "async.json").read_text())["paces"]
    assert turns["samples"] == overlap["samples"] == 6 * 16 * 16
    assert turns["rewards"][0][1] == overlap["rewards"][0][1]  # both begin where the warm-up ended
    assert set(turns["staleness"]) == {"0"}
    assert set(overlap["staleness"]) <= {"0", "1"}
    (trained,) = (line for line in output.splitlines() if "prompts trained" in line)
    assert trained.split()[-2:] == ["96", "96"]


@given(
    bound=st.integers(0, 3),
    per_round=st.integers(1, 5),
    moves=st.lists(st.one_of(st.integers(1, 7), st.none()), max_size=60),
)
def test_whoever_learns_in_order_finds_nothing_too_old(bound, per_round, moves):
    rounds = 6

    async def admitted():
        admission, versions = Admission(bound, per_round, rounds, dropped=lambda: 0), []
        for most in moves:
            if most is None:  # a round is over, if there was enough to learn from
                if len(versions) >= admission.version * per_round:
                    await admission.note(admission.version + 1)
            elif admission.room:
                versions += [admission.version] * await admission.admit(most)
        return admission, versions

    admission, versions = asyncio.run(admitted())
    assert admission.asked == len(versions) <= rounds * per_round
    for number, version in enumerate(versions):
        learnt_in = number // per_round + 1
        assert learnt_in - version <= bound
    if len(versions) < rounds * per_round:  # and nobody waits for what is never asked for
        assert admission.room or len(versions) >= admission.version * per_round


def test_what_was_dropped_is_asked_for_again_by_those_who_wait():
    async def replaced():
        dropped = 0
        admission = Admission(bound=0, per_round=4, rounds=9, dropped=lambda: dropped)
        assert await admission.admit(4) == 4
        waiting = asyncio.create_task(admission.admit(4))
        await asyncio.sleep(0)
        assert not waiting.done()
        dropped = 3
        await admission.note()
        assert await asyncio.wait_for(waiting, 60) == 3
        return admission

    assert asyncio.run(replaced()).version == 1


def test_overlapping_calls_are_one_time_with_something_to_do():
    now = 0.0
    occupancy = Occupancy(lambda: now)
    with occupancy.call():
        now = 1.0
        with pytest.raises(KeyError), occupancy.call():
            now = 2.0
            raise KeyError
        now = 4.0
        assert occupancy.busy_s == 4.0
    now = 10.0
    assert occupancy.busy_s == 4.0


def watched(history, seconds):
    """A stopwatch that saw two rounds and three measurements."""
    now = 100.0
    watch = Stopwatch(history, lambda: None, lambda: now)
    for step, (at, took) in enumerate(seconds):
        now = 100.0 + at
        if step:
            staleness = [0, 1] if len(took) == 3 else []
            history.steps.append(StepRecord(step, 0.5, 0.1, 0, 0, 0, step, 9, took, staleness))
        history.evaluations.append(Evaluation(step, step / 2))
        watch()
    return watch


def test_the_picture_shows_both_paces(tmp_path):
    turn = dict(zip(PHASES, (1.0, 0.5, 1.5, 0.5), strict=True))
    turns = in_turns(watched(History(), [(0, {}), (4, turn), (8, turn)]), 2, 16)
    assert (turns.wall_s, turns.samples, turns.samples_per_s) == (8.0, 64, 8.0)
    assert turns.idle == {"trainer": 0.5, "generators": 0.5}  # one second was for measuring
    assert (turns.staleness, turns.mean_staleness) == ({0: 4}, 0)
    assert (turns.seconds_to(0.5), turns.seconds_to(1.0), turns.seconds_to(2.0)) == (4.0, 8.0, None)

    over = dict(zip(OVERLAPPED, (0.2, 1.5, 0.3), strict=True))
    counts = {"produced": 5, "trained": 4, "dropped as too old": 1, "left over": 0}
    watch = watched(History(phases=OVERLAPPED), [(0, {}), (2, over), (4, over)])
    faster = overlapped(watch, 1, 16, {"trainer": 3.0, "generators": 2.0}, counts)
    assert faster.name == "at most 1 version behind"
    assert faster.idle == {"trainer": 0.25, "generators": 0.5}
    assert (faster.staleness, faster.mean_staleness, faster.samples_per_s) == ({0: 2, 1: 2}, 0.5, 16.0)

    picture, figures = write_comparison([turns, faster], {"title": "a test"}, tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    paces = json.loads(figures.read_text())["paces"]
    assert [pace["samples_per_s"] for pace in paces] == [8.0, 16.0]
    assert paces[1]["counts"] == counts


@pytest.mark.parametrize(
    "other",
    [
        ["--no-sync"],
        ["--resume"],
        ["--checkpoint-every", "5"],
        ["--kill-generator-at", "2"],
        ["--kill-trainer-at", "2"],
    ],
)
def test_what_goes_with_rounds_in_turns_alone_is_refused_by_name(capsys, other):
    with pytest.raises(SystemExit, match="2"):
        parse_options(["--async", "2", *other])
    assert f"--async does not go with {other[0]}" in capsys.readouterr().err


def test_the_bound_reaches_the_options():
    assert parse_options(["--async", "2"]).max_staleness == 2
    assert parse_options(["--async", "0"]).max_staleness == 0
    assert parse_options([]).max_staleness is None
    with pytest.raises(SystemExit, match="2"):
        parse_options(["--async", "-1"])
