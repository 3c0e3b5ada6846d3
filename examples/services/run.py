"""Reward servers beside workers: `python examples/services/run.py [--quick]`.

A reward model is often a web application that others use, too. Here a service runs two of them, each a
process of its own on a bundle of the cluster, behind a token. A proxy gives them one endpoint, which workers
of another group are handed; half-way one of the servers is killed, and nobody notices.
"""

import argparse
import json
import os
import signal
from pathlib import Path
from urllib.request import Request, urlopen

from rich.console import Console

from raycrew.cluster_core import RayVirtualCluster, init_ray
from raycrew.worker_groups import RayWorkerGroup, current_worker, per_rank
from raycrew.worker_groups.services import Endpoint, Proxy, Service

TIMEOUT_S = 60.0
HERE = Path(__file__).parent


class Generator:
    """Makes answers, and has them scored by the service."""

    def __init__(self, rewards: Endpoint) -> None:
        self.rewards = rewards

    @per_rank
    def rollout(self, prompts: list[str]) -> list[float]:
        """Rewards of this rank's prompts; half of the answers are right."""
        pairs = [(prompt, prompt[::-1] if i % 2 else prompt) for i, prompt in enumerate(prompts)]
        once = {"Idempotency-Key": f"{current_worker().rank}-{prompts[0]}"}  # may be scored twice
        headers = {**self.rewards.headers, **once}
        request = Request(f"{self.rewards.url}/score", json.dumps(pairs).encode(), headers)
        with urlopen(request, timeout=TIMEOUT_S) as answer:
            return [float(reward) for reward in json.load(answer)]


def serve_and_score(cluster: RayVirtualCluster, rounds: int) -> tuple[list[str], list[list[float]]]:
    """Addresses of the servers, and the rewards of each generator's last round."""
    with (
        Service(cluster, "rewards:create", replicas=2, cwd=HERE, name="rewards") as service,
        Proxy(service) as proxy,
        RayWorkerGroup(cluster, Generator, rewards=proxy.endpoint) as generators,
    ):
        servers = [endpoint.url for endpoint in service.endpoints]
        for number in range(rounds):
            if number == rounds // 2:
                kill(service)
            prompts = [[f"{rank}-{number}-{i}abc" for i in range(4)] for rank in range(2)]
            rewards = generators.call(Generator.rollout, prompts).get_results(timeout=2 * TIMEOUT_S)
    return servers, rewards


def kill(service: Service) -> None:
    """Kill the server of one replica; the service starts it anew."""
    pid = service.replicas[0].pid
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Read the options, and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, to see that everything works")
    options = parser.parse_args()
    with (
        init_ray(num_cpus=4),
        RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=2) as cluster,
    ):
        servers, rewards = serve_and_score(cluster, rounds=1 if options.quick else 20)
    console = Console()
    for server, each in zip(servers, rewards, strict=True):
        console.print(f"{server}: {', '.join(f'{reward:.2f}' for reward in each)}")


if __name__ == "__main__":
    main()
