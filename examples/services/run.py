"""Reward servers beside workers: `python examples/services/run.py [--quick]`.

A reward model is often a server of its own, with an HTTP interface that others use too. Here each rank of a
group runs one, on a port that cluster-core leases, so that servers of several groups on one node never
collide. Workers of another group ask them over HTTP; the driver hands them nothing but addresses.
"""

import argparse
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import Request, urlopen

from rich.console import Console

from raycrew.cluster_core import RayVirtualCluster, init_ray, lease_ports
from raycrew.worker_groups import RayWorkerGroup, current_worker, per_rank

TIMEOUT_S = 30.0


def score(prompt: str, answer: str) -> float:
    """The reward: the share of places at which the answer is the prompt reversed."""
    wanted = prompt[::-1]
    return sum(a == b for a, b in zip(answer, wanted, strict=False)) / max(len(wanted), 1)


class Handler(BaseHTTPRequestHandler):
    """`POST /score` with a list of pairs gives rewards; `GET /health` says that the server is up."""

    def do_GET(self) -> None:
        """Answer `GET /health`."""
        self._answer(200 if self.path == "/health" else 404, {"path": self.path})

    def do_POST(self) -> None:
        """Answer `POST /score`."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            pairs = [(str(prompt), str(answer)) for prompt, answer in json.loads(body)]
        except (ValueError, TypeError) as error:
            return self._answer(400, {"error": f"not a list of (prompt, answer): {error}"})
        return self._answer(200, [score(*pair) for pair in pairs])

    def _answer(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing for each request."""


class RewardServer:
    """A server in a thread of a worker; it ends with the worker, or with `stop`."""

    def __init__(self) -> None:
        here = current_worker().node_address
        self.lease = lease_ports(host=here)  # held for as long as this process serves
        self.server = ThreadingHTTPServer((here, self.lease.port), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.url = f"http://{here}:{self.lease.port}"

    def address(self) -> str:
        """Where this rank serves."""
        return self.url

    def stop(self) -> None:
        """End the server; `shutdown(cleanup_method="stop")` calls this."""
        self.server.shutdown()
        self.server.server_close()
        self.lease.release()


class Generator:
    """Makes answers, and has them scored by whichever server is its own."""

    def __init__(self, servers: Sequence[str]) -> None:
        self.server = servers[current_worker().rank % len(servers)]

    @per_rank
    def rollout(self, prompts: list[str]) -> list[float]:
        """Rewards of this rank's prompts; half of the answers are right."""
        pairs = [(prompt, prompt[::-1] if i % 2 else prompt) for i, prompt in enumerate(prompts)]
        return ask(self.server, pairs)


def ask(server: str, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """Rewards of some answers, from one server."""
    request = Request(f"{server}/score", json.dumps(pairs).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=TIMEOUT_S) as answer:
        return [float(reward) for reward in json.load(answer)]


def is_up(server: str) -> bool:
    """Whether a server answers."""
    with urlopen(f"{server}/health", timeout=TIMEOUT_S) as answer:
        return bool(answer.status == 200)


def serve_and_score(cluster: RayVirtualCluster, rounds: int) -> tuple[list[str], list[list[float]]]:
    """Addresses of the servers, and the rewards of each generator's last round."""
    with RayWorkerGroup(cluster, RewardServer, name_prefix="rewards") as services:
        servers = services.call(RewardServer.address).get_results(timeout=60)
        with ThreadPoolExecutor() as threads:
            if not all(threads.map(is_up, servers)):
                raise RuntimeError(f"not all of {servers} answer")
        with RayWorkerGroup(cluster, Generator, servers=servers) as generators:
            for number in range(rounds):
                prompts = [[f"{rank}-{number}-{i}abc" for i in range(4)] for rank in range(2)]
                rewards = generators.call(Generator.rollout, prompts).get_results(timeout=60)
        services.shutdown(cleanup_method="stop")
    return servers, rewards


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
