import pytest
import ray
from launched_workers import Launched

from raycrew.cluster_core import RayVirtualCluster, init_ray
from raycrew.worker_groups import RayWorkerGroup, WorkerFailureError

LAUNCHER = """#!/bin/sh
LAUNCHED_BY="$1"; export LAUNCHED_BY
shift
exec "$@"
"""


def test_each_rank_gets_its_own_and_what_the_driver_has_now(local_ray, monkeypatch, tmp_path):
    launcher = tmp_path / "a launcher"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o700)
    proxy = "http://user:password@proxy.example"  # allowed, and holds credentials
    with init_ray(ray.get_runtime_context().gcs_address), RayVirtualCluster([2], use_gpus=False) as cluster:
        for name, value in {
            "NCCL_DEBUG": "INFO",
            "NCCL_ALGO": "Ring",
            "HTTP_PROXY": proxy,
            "OTHER": "1",
        }.items():
            monkeypatch.setenv(name, value)
        with RayWorkerGroup(
            cluster,
            Launched,
            init=lambda rank: {"rank": rank.rank, "transport": f"of {rank.rank}"},
            env_vars=lambda rank: {"NCCL_ALGO": f"Tree{rank.rank}", "MINE": f"{rank.generation}-{rank.rank}"},
            launchers={"Launched-0-1": [str(launcher), "a word"]},
            colour="red",
        ) as group:
            monkeypatch.setenv("NCCL_DEBUG", "WARN")  # too late
            names = ("NCCL_DEBUG", "NCCL_ALGO", "HTTP_PROXY", "OTHER", "MINE")
            assert group.call("get_own").get_results() == [
                (rank, f"of {rank}", {"colour": "red"}) for rank in (0, 1)
            ]
            assert group.call("variables", *names).get_results() == [
                ["INFO", f"Tree{rank}", proxy, None, f"0-{rank}"] for rank in (0, 1)
            ]
            assert group.call("launched_by").get_results() == [(None, True), ("a word", True)]

            with pytest.raises(WorkerFailureError):
                group.call("die_on", 1).get_results()
            assert group.restart_failed_workers() == [1]
            assert group.call("get_own").get_results()[1] == (1, "of 1", {"colour": "red"})
            assert group.call("variables", *names).get_results() == [
                ["INFO", f"Tree{rank}", proxy, None, f"1-{rank}"] for rank in (0, 1)
            ]
            assert group.call("launched_by").get_results()[1] == ("a word", True)

        with pytest.raises(ValueError, match="LD_PRELOAD counts only from the start of a process"):
            RayWorkerGroup(cluster, Launched, rank=0, env_vars=lambda rank: {"LD_PRELOAD": "x"})
        with RayWorkerGroup(cluster, Launched, rank=0) as free:
            assert len(free.ranks) == 2
