"""The driver's side of generation: what it refuses, how it shares prompts out, and what a death does."""

import pytest

pytest.importorskip("transformers")

from generation_conformance import BAD_SAMPLING, LONG
from generation_echo import MODEL as ECHO
from generation_echo import VOCABULARY, EchoTrainer, EchoWorker
from generation_stage import PROMPTS, batch_of, group_stage, rows_of, survive

from generation import EngineOptions, Generators, PromptError, SamplingError
from generation.group import PREFIX_TOKENS
from raycrew.cluster_core.testing import FakeCluster, connected
from raycrew.tensor_transport import StaleWeightsError
from raycrew.worker_groups.testing import InProcessGroup


@pytest.fixture(scope="module")
def echoes(local_ray_session):
    """Two replicas of an engine without a model."""
    with (
        connected(local_ray_session),
        group_stage("generation_echo.EchoWorker", 2, ECHO, EchoTrainer, name_prefix="echo") as made,
    ):
        yield made


def test_the_driver_sends_nothing_that_is_refused(echoes):
    limits, before = echoes.generators.limits, echoes.generators.metrics()
    assert limits.vocabulary_size == VOCABULARY
    for batch, says in [(batch_of([[5], []]), "row 1 is empty"), (batch_of([[97]]), "the id 97")]:
        with pytest.raises(PromptError, match=says):
            echoes.generators.generate(batch)
    for options, says in BAD_SAMPLING:
        with pytest.raises(SamplingError, match=says):
            echoes.generators.generate(batch_of(), options)
    with pytest.raises(ValueError, match="prompts_per_call must be at least 1, not -1"):
        list(echoes.generators.stream(batch_of(), prompts_per_call=-1))
    assert echoes.generators.metrics() == before


def test_prompts_are_shared_by_replicas_however_they_are_parted(echoes):
    how, batch = {"n": 2, "max_tokens": 5, "seed": 7}, batch_of(PROMPTS * 4)
    rows = rows_of(echoes.generators.generate(batch, how))
    assert [row[:2] for row in rows] == [(p, s) for p in range(len(PROMPTS) * 4) for s in range(2)]
    assert rows == rows_of(echoes.generators.generate(batch, how, prompts_per_call=1))
    streamed = [rows_of(part) for part in echoes.generators.stream(batch, how)]
    assert sorted(row for part in streamed for row in part) == sorted(rows)
    assert all(found.tokens for found in echoes.generators.metrics())


def test_each_replica_has_a_run_of_its_own_while_the_driver_does_something_else(echoes):
    how, generators = {"n": 2, "max_tokens": 5, "seed": 7}, echoes.generators
    before = [found.tokens for found in generators.metrics()]
    parts = generators.begin(batch_of(PROMPTS), how).get_results()
    assert [found.tokens for found in generators.metrics()] == [tokens + 20 for tokens in before]
    rows = rows_of(generators.generate(batch_of(PROMPTS), how))
    assert [rows_of(part) for part in parts] == [rows[:4], rows[4:]]
    (alone,) = generators.begin(batch_of(PROMPTS[:1]), how).get_results()
    assert rows_of(alone) == rows[:2]
    with pytest.raises(PromptError, match="row 1 is empty"):
        generators.begin(batch_of([[5], []]))


def test_one_that_is_killed_catches_up_and_nothing_is_there_twice(echoes):
    assert echoes.sync() == echoes.version
    pids = echoes.generators.call("pid")
    found = survive(echoes, pids[0], batch_of(PROMPTS * 3), LONG)
    first, second = echoes.generators.call("pid")
    assert (first == pids[0], second == pids[1]) == (False, True)
    assert sorted(row[0] for row in found) == list(range(len(PROMPTS) * 3))
    for row in found:
        assert set(row[4]) == {echoes.version}
        assert set(row[3]) == {float(echoes.version)}, "which is the weight"
    assert [now.weight_version for now in echoes.generators.metrics()] == [echoes.version] * 2


def test_prompts_that_begin_alike_go_to_one_replica():
    made = InProcessGroup(
        FakeCluster([2]),
        EchoWorker,
        init={"options": EngineOptions(ECHO)},
        enable_load_balancing=True,
        load_balancing_strategy="consistent_hash",
    )
    with Generators(made, keyed=True) as generators:
        alike = [[5] * PREFIX_TOKENS + [last] for last in range(20)]
        assert len(generators.generate(batch_of(alike), {"max_tokens": 1})["output_ids"]) == 20
        assert sorted(found.tokens for found in generators.metrics()) == [0, 20]
        generators.generate(batch_of([[first] for first in range(20)]), {"max_tokens": 1})
        assert all(found.tokens > 2 for found in generators.metrics())


@pytest.mark.long
def test_a_transformers_generator_that_is_killed_makes_the_same_samples(local_ray):
    with group_stage("transformers", synced=False, name_prefix="killed") as stage:
        with stage.refused(StaleWeightsError, "holds no version"):
            stage.generators.generate(batch_of())
        stage.sync()
        wanted = rows_of(stage.generators.generate(batch_of(), LONG))
        found = survive(stage, stage.call("pid"), batch_of(), LONG)
        assert [row[:3] for row in sorted(found)] == [row[:3] for row in wanted]
