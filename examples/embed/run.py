"""cluster-core alone, inside a framework of one's own: `python examples/embed/run.py [--quick]`.

The framework has actors of its own, written for Ray and nothing else. cluster-core gives it what is tedious:
bundles that are allocated or refused with a reason, one actor per bundle, an order of ranks that a restart
does not change, and an address and port at which the gang meets.
"""

import argparse
import time
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener
from types import TracebackType
from typing import Any, Self

import ray
from rich.console import Console

from raycrew.cluster_core import Claim, Cluster, InfeasibleRequestError, RayVirtualCluster, init_ray


class Member:
    """One process of the gang; rank 0 adds up what all have."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.peers: list[Connection[Any, Any]] = []

    def meet(self, host: str, port: int, key: bytes) -> int:
        """Connect to rank 0, or wait there for the others; gives how many connections this rank has."""
        if self.rank == 0:
            with Listener((host, port), backlog=self.world_size, authkey=key) as listener:
                self.peers = [listener.accept() for _ in range(1, self.world_size)]
        else:
            self.peers = [self._reach(host, port, key)]
        return len(self.peers)

    def _reach(self, host: str, port: int, key: bytes, timeout_s: float = 60) -> "Connection[Any, Any]":
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return Client((host, port), authkey=key)
            except ConnectionRefusedError:  # rank 0 is not there yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def all_sum(self, value: float) -> float:
        """The sum of all ranks' values, on every rank."""
        if self.rank:
            self.peers[0].send(value)
            return float(self.peers[0].recv())
        total = float(value + sum(peer.recv() for peer in self.peers))
        for peer in self.peers:
            peer.send(total)
        return total


class Gang:
    """What a framework calls its group of actors: one on each bundle that it claims.

    Args:
        cluster: Where to place them; a `FakeCluster` in tests.
        name: Under which the bundles are held, and named to whoever wants them too.
    """

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.claim: Claim = cluster.claim(None, name)
        size = len(self.claim.bundles)
        make = ray.remote(Member)
        self.members: list[Any] = [
            make.options(**self.claim.actor_options(rank)).remote(rank, size) for rank in range(size)
        ]

    def meet(self, key: bytes) -> list[int]:
        """Have all members meet on rank 0's node, at a port that nobody else gets."""
        place = self.cluster.rendezvous(self.claim.bundles[0].index)
        return self.call("meet", place.address, place.port, key)

    def call(self, method: str, *arguments: object, timeout_s: float = 60) -> list[Any]:
        """Call all members at once."""
        calls = [getattr(member, method).remote(*arguments) for member in self.members]
        return list(ray.get(calls, timeout=timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self.members:
            ray.kill(member)  # noqa: TID251 - this framework ends its actors by Ray's own means
        self.claim.release()


def add_up(cluster: Cluster, rounds: int) -> list[float]:
    """Let a gang add up its ranks' numbers, again and again, each time what came out the time before."""
    totals = [1.0]
    with Gang(cluster, "adders") as gang:
        gang.meet(key=b"of this run alone")
        for _ in range(rounds):
            results = gang.call("all_sum", totals[-1])
            if len(set(results)) != 1:
                raise RuntimeError(f"the ranks disagree: {results}")
            totals.append(results[0])
    return totals


def explain_refusal(bundles: Sequence[int]) -> str:
    """What a request is told that this cluster can never fulfil; nothing is left reserved."""
    try:
        RayVirtualCluster(bundles, use_gpus=False, cpus_per_bundle=1).shutdown()
    except InfeasibleRequestError as error:
        return str(error)
    raise RuntimeError(f"{bundles} fits after all")


def main() -> None:
    """Read the options, and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds, to see that everything works")
    options = parser.parse_args()
    console = Console()
    with init_ray(num_cpus=4):
        with RayVirtualCluster([3], use_gpus=False, name="gang") as cluster:
            for bundle in cluster.bundles:
                console.print(f"rank {bundle.index} on node {bundle.node_index} ({bundle.node_address})")
            console.print(add_up(cluster, rounds=2 if options.quick else 10))
        console.print(explain_refusal([1000]), soft_wrap=True)


if __name__ == "__main__":
    main()
