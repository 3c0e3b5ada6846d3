"""A collection whose collector and workers are killed at any moment: each prompt is there once in the end."""

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from patience import read_pids

from raycrew.worker_groups.rollouts import SampleQueue

N = 120
COLLECTOR = """
    import sys

    import ray
    import rollout_agents

    from raycrew.cluster_core import RayVirtualCluster
    from raycrew.worker_groups.rollouts import RolloutPool, SampleQueue

    address, folder, n = sys.argv[1], sys.argv[2], int(sys.argv[3])
    ray.init(address=address, log_to_driver=False)
    options = {"samples_per_prompt": 2, "in_flight_per_worker": 3, "retries": 50, "deadline_s": 60}
    options["group"] = {"env_vars": {"PIDS_IN": f"{folder}/pids"}}
    with (
        SampleQueue(["tokens"], directory=f"{folder}/queue") as queue,
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RolloutPool(cluster, rollout_agents.sample, **options) as pool,
    ):
        print("begins", flush=True)
        collection = pool.collect(range(n), folder=f"{folder}/run", jsonl=f"{folder}/out.jsonl", queue=queue)
        for group in collection:
            print("done", group.id, flush=True)
        print("ends", collection.stats().skipped, flush=True)
"""


class Collector:
    """A process that collects."""

    def __init__(self, address, folder):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        arguments = [sys.executable, "-c", textwrap.dedent(COLLECTOR), address, str(folder), str(N)]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)

    def read_until(self, n_lines):
        """Read lines of what is done; whether there were as many."""
        told = self.process.stdout
        return all(told.readline().startswith(("begins", "done")) for _ in range(n_lines))

    def end(self):
        """Wait for its end, and give the last thing that it said."""
        told = self.process.stdout.read().splitlines()
        return self.process.wait(), told[-1:]


def kill_a_worker(folder, dice):
    """One that has had a rollout, of whichever collector: it may have ended since."""
    for pid in dice.sample(read_pids(folder), k=1):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        (pathlib.Path(folder) / str(pid)).unlink()


@pytest.mark.hostile
@pytest.mark.parametrize("kills", [1, pytest.param(6, marks=pytest.mark.long)])
def test_whoever_is_killed_each_prompt_is_in_the_file_and_the_queue_once(local_ray_session, tmp_path, kills):
    dice = random.Random(kills)
    (tmp_path / "pids").mkdir()
    for _ in range(kills):
        collector = Collector(local_ray_session, tmp_path)
        try:
            assert collector.read_until(dice.randrange(2, 10))
            kill_a_worker(tmp_path / "pids", dice)
            collector.read_until(dice.randrange(1, N // kills // 2))
            time.sleep(dice.random() * 0.05)  # anywhere between two lines
        finally:
            collector.process.kill()
            collector.end()
    collector = Collector(local_ray_session, tmp_path)
    assert collector.read_until(3)
    kill_a_worker(tmp_path / "pids", dice)
    code, last = collector.end()
    assert code == 0 and last[0].startswith("ends") and int(last[0].split()[1]) > 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(int(line["id"]) for line in lines) == list(range(N))
    for line in lines:
        assert [sample["tokens"] for sample in line["samples"]] == [[int(line["id"]), i] for i in range(2)]
    with SampleQueue(["tokens"], directory=tmp_path / "queue") as queue:
        batch = queue.get(10 * N, at_least=1, timeout_s=0)
        assert sorted(batch["tokens"]) == [[i, j] for i in range(N) for j in range(2)]
        assert [runs[0].version for runs in batch.runs] == [tokens[0] % 3 for tokens in batch["tokens"]]
