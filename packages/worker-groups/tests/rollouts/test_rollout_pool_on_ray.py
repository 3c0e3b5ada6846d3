"""Pools on Ray: rollouts that are late, block, die or raise, and what becomes of those beside them."""

import asyncio
import json
import threading

import pytest
import rollout_agents
from patience import eventually, is_running, read_pids
from ray import cloudpickle

from raycrew.cluster_core import RayVirtualCluster
from raycrew.cluster_core.testing import connected
from raycrew.worker_groups import SampleQueue, WorkerGroupClosedError
from raycrew.worker_groups.rollouts import RolloutFileError, RolloutPool
from raycrew.worker_groups.rollouts._engine import calls

BESIDE = [{"sleep": 0.2, "n": i} for i in range(6)]


@pytest.fixture(scope="module")
def cluster(local_ray_session):
    with connected(local_ray_session), RayVirtualCluster([4], use_gpus=False) as made:
        yield made


@pytest.fixture(scope="module")
def pool(cluster):
    options = {"deadline_s": 3.0, "cancel_grace_s": 0.3, "in_flight_per_worker": 4, "on_error": "return"}
    places = {"bundle_indices_list": [[0], [1]]}
    with RolloutPool(cluster, "rollout_agents.obey", "rollout_agents.Tools", group=places, **options) as made:
        yield made


def collected(pool, prompts):
    return {int(group.id): group for group in pool.collect(prompts)}


def test_rollouts_run_beside_one_another_on_all_workers(pool):
    groups = collected(pool, [{"sleep": 0.2}] * 16)
    assert sorted(groups) == list(range(16)) and not any(group.failures for group in groups.values())
    ranks = [group.samples[0][0] for group in groups.values()]
    assert min(ranks.count(0), ranks.count(1)) >= 4
    assert max(group.samples[0][3] for group in groups.values()) > 1, "they share the worker's state"


def test_one_that_is_late_is_cancelled_and_tried_on_another_worker(pool):
    groups = collected(pool, [{"how": "late", "times": 1}, {"how": "late"}])
    rank, _, attempt, _ = groups[0].samples[0]
    assert attempt == 1 and rank in (0, 1)
    assert groups[1].samples == (None,)
    assert groups[1].failures[0].kind == "late" and groups[1].failures[0].attempts == 2


def test_errors_of_the_user_are_not_tried_again_unless_that_is_wanted(pool):
    groups = collected(pool, [{"how": "raise", "times": 1}, {}])
    failure = groups[0].failures[0]
    assert failure.kind == "raised" and failure.attempts == 1 and "as it was told" in failure.message
    assert groups[1].samples[0][2] == 0


@pytest.mark.hostile
@pytest.mark.parametrize("how", ["die", "block", pytest.param("ignore", marks=pytest.mark.long)])
def test_one_that_takes_its_process_along_does_not_take_others(pool, monkeypatch, how):
    monkeypatch.setattr(calls, "ANSWER_S", 1.0)
    prompts = [*BESIDE, {"how": how, "times": 1}, *BESIDE]
    groups = collected(pool, prompts)
    assert sorted(groups) == list(range(len(prompts)))
    guilty = groups.pop(len(BESIDE))
    assert guilty.samples[0][2] == 1 and not guilty.failures
    assert not any(group.failures for group in groups.values())
    assert all(group.samples[0][2] == 0 for group in groups.values()), "no attempt of theirs counts"
    eventually(lambda: not pool.group.absent_ranks, "all workers again")


def test_samples_go_to_a_file_and_a_queue_of_the_cluster(cluster, tmp_path):
    (tmp_path / "pids").mkdir()
    places = {"bundle_indices_list": [[2], [3]], "env_vars": {"PIDS_IN": str(tmp_path / "pids")}}
    with (
        RolloutPool(cluster, rollout_agents.sample, samples_per_prompt=2, group=places) as other,
        SampleQueue.on_ray(["tokens", "reward"]) as queue,
    ):
        stats = other.collect(range(10), jsonl=tmp_path / "out.jsonl", queue=queue).run()
        assert (stats.produced, stats.handed_out, stats.in_flight) == (20, 10, 0)
        lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        second = {line["id"]: line["samples"][1]["tokens"] for line in lines}
        assert second == {str(i): [i, 1] for i in range(10)}
        batch = queue.get(20, columns=["tokens"], timeout_s=60)
        assert sorted(batch["tokens"]) == sorted([i, j] for i in range(10) for j in range(2))
        assert [runs[0].version for runs in batch.runs] == [tokens[0] % 3 for tokens in batch["tokens"]]

        async def main():
            return [group.id async for group in other.collect(range(5))]

        assert sorted(asyncio.run(main())) == list("01234")
        for columns, more, message in (
            (["tokens", "version"], {}, "another name"),
            (["tokens"], {"max_samples": 1}, "holds 1 samples"),
        ):
            with SampleQueue(columns, **more) as wrong, pytest.raises(ValueError, match=message):
                other.collect(range(5), jsonl=tmp_path / "other.jsonl", queue=wrong)
        other.collect([], folder=tmp_path / "run").close()
        with pytest.raises(RolloutFileError, match="its destination is 'the iteration alone', not 'a file'"):
            other.collect([], folder=tmp_path / "run", jsonl=tmp_path / "other.jsonl")
        with pytest.raises(TypeError, match="stays in its process"):
            cloudpickle.dumps(other)
        endless = other.collect(iter(int, 1))
        next(endless)
    pids = read_pids(tmp_path / "pids")
    assert len(pids) == 2 and not any(map(is_running, pids))
    with pytest.raises(WorkerGroupClosedError):
        other.collect([1])


def test_bad_options_are_refused_before_anything_starts():
    async def rollout(prompt):
        return prompt

    for options, error, message in (
        ({"samples_per_prompt": 0}, ValueError, "at least 1"),
        ({"deadline_s": 0}, ValueError, "above 0"),
        ({"deadline_s": float("inf")}, ValueError, "finite"),
        ({"deadline_s": "1"}, TypeError, "number of seconds"),
        ({"retries": -1}, ValueError, "at least 0"),
        ({"retries": True}, TypeError, "whole number"),
        ({"on_error": "skip"}, ValueError, "raise, return"),
        ({"in_flight_per_worker": 1001}, ValueError, "at most 1000"),
        ({"max_in_flight": 0}, ValueError, "at least 1"),
        ({"state": 7}, TypeError, "makes a worker's state"),
        ({"rollout": "no path"}, ValueError, "import path"),
        ({"rollout": "name"}, ValueError, "import path"),
        ({"rollout": print}, TypeError, "coroutine function"),
        ({"group": {"min_workers": 1}}, ValueError, "min_workers itself"),
        ({"group": [1]}, TypeError, "a mapping"),
        ({"name": ""}, TypeError, "what the pool is called"),
        ({"retry_errors": 1}, TypeError, "True or False"),
    ):
        with pytest.raises(error, match=message):
            RolloutPool(None, **{"rollout": rollout, **options})
    lock = threading.Lock()

    async def holding(prompt):
        return lock

    with pytest.raises(TypeError, match="can't be pickled"):
        RolloutPool(None, holding)
