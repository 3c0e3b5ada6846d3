"""The small example programs: in this process on one shared Ray, and as a user runs them."""

import asyncio
import importlib.util
import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
import torch

from raycrew.cluster_core import RayVirtualCluster
from raycrew.cluster_core.testing import FakeCluster
from raycrew.tensor_transport import BatchedDataDict

EXAMPLES = Path(__file__).parent.parent / "examples"
PROGRAMS = ("agent", "async_rollouts", "data_parallel", "embed", "environments", "ppo", "services")


@contextmanager
def program(name):
    """An example's module; its classes travel with the calls, as those of a script do."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / name / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    ray.cloudpickle.register_pickle_by_value(module)
    try:
        yield module
    finally:
        ray.cloudpickle.unregister_pickle_by_value(module)
        del sys.modules[spec.name]


def cluster(*bundles, groups=1):
    return RayVirtualCluster(list(bundles), use_gpus=False, max_colocated_worker_groups=groups)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_short_and_uses_public_names_alone(name):
    lines = (EXAMPLES / name / "run.py").read_text().splitlines()
    assert len(lines) < 200
    imports = [line for line in lines if line.startswith(("from raycrew", "import raycrew"))]
    assert imports
    assert not [line for line in imports if "._" in line or " _" in line]
    assert (EXAMPLES / name / "README.md").is_file()


def test_ppo_advantages_are_discounted_sums_of_errors():
    with program("ppo") as ppo:
        rewards, values = torch.tensor([[0.0, 0.0, 0.0, 1.0]]), torch.zeros(1, 4)
        wanted = [[0.5**3, 0.5**2, 0.5, 1.0]]
        assert ppo.advantages_of(rewards, values, decay=0.5).tolist() == wanted
        assert ppo.advantages_of(rewards, torch.ones(1, 4), decay=0.0).tolist() == [[0.0, 0.0, 0.0, 0.0]]


def test_rollouts_are_admitted_up_to_the_bound_and_stale_rows_are_dropped():
    def rows(version, count):
        return BatchedDataDict({"versions": torch.full((count,), version)})

    async def scenario(example):
        rollouts = example.Rollouts(bound=1)
        room = [rollouts._has_room()]
        rollouts.admitted = 2 * example.ROWS_PER_STEP
        room.append(rollouts._has_room())
        await rollouts.note(version=3)
        room.append(rollouts._has_room())
        for version in (1, 2, 3):
            await rollouts.ready.put(rows(version, example.ROWS))
        batch = await rollouts.next_batch()
        return room, rollouts.dropped, set(batch["versions"].tolist()), rollouts.admitted

    with program("async_rollouts") as example:
        room, dropped, versions, admitted = asyncio.run(scenario(example))
        assert room == [True, False, True]
        assert (dropped, versions) == (example.ROWS, {2, 3})
        assert admitted == 2 * example.ROWS_PER_STEP - example.ROWS


@pytest.mark.long
def test_rollouts_go_on_while_the_trainer_trains_and_none_is_too_old(local_ray):
    with program("async_rollouts") as example, cluster(3) as bundles:
        steps = asyncio.run(example.run(bundles, steps=12, bound=2))
    assert len(steps) == 12
    assert 0 < max(step.staleness for step in steps) <= 2
    assert steps[-1].reward > steps[0].reward


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_kinds_of_workers_have_releases_that_exclude_each_other(local_ray, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYCREW_VENV_DIR", str(tmp_path / "store"))
    with program("environments") as example, cluster(1) as bundles:
        results = example.encode(bundles, example.specs_of(example.publish(tmp_path)))
    assert results == {"kinds.Trainer": [("1.0", [97, 98])], "kinds.Engine": [("2.0", [-1, 97, 98])]}


@pytest.mark.long
def test_a_ppo_actor_learns_to_reverse_digits(local_ray):
    with program("ppo") as ppo, cluster(2, groups=3) as bundles:
        curve = ppo.learn(bundles, steps=16, rows=128)
    assert len(curve) == 16
    assert curve[0] < 0.35
    assert max(curve[-3:]) > curve[0] + 0.1


def test_a_gang_of_plain_actors_meets_on_the_bundles_that_it_claims(local_ray):
    with program("embed") as embed, cluster(3) as bundles:
        assert embed.add_up(bundles, rounds=2) == [1.0, 3.0, 9.0]
        assert not bundles.holders()
        assert "1000" in embed.explain_refusal([1000])


def test_a_gang_gives_bundles_back_without_ray_too(local_ray):
    with program("embed") as embed:
        fake = FakeCluster([1])
        assert embed.add_up(fake, rounds=1) == [1.0, 1.0]
        fake.claim(None, "somebody else").release()


@pytest.mark.long
def test_data_parallel_training_survives_a_rank(local_ray):
    with program("data_parallel") as training, cluster(3) as bundles:
        run = training.train(bundles, steps=8, kill_at=3)
    assert [death.rank for death in run.deaths] == [1]
    assert len(run.losses) == 8
    assert run.weights == [run.weights[0]] * 3


def test_reward_servers_answer_workers_of_another_group(local_ray):
    with program("services") as services, cluster(2, groups=2) as bundles:
        servers, rewards = services.serve_and_score(bundles, rounds=1)
    assert len(set(servers)) == 2
    for each in rewards:
        assert each[1] == each[3] == 1.0
        assert each[0] < 1.0


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_a_script(name, tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLES / name / "run.py", "--quick"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.strip()


@pytest.mark.long
def test_the_whole_ppo_run_solves_its_task(tmp_path):
    curve = tmp_path / "curve.json"
    subprocess.run(
        [sys.executable, EXAMPLES / "ppo" / "run.py", "--json", curve], cwd=tmp_path, timeout=280, check=True
    )
    rewards = json.loads(curve.read_text())
    assert len(rewards) == 60
    assert rewards[-1] > 0.9
