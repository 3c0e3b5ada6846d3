"""For tests: a cluster without Ray, pytest fixtures with Ray, and what every `Cluster` must do.

Load the fixtures with `pytest_plugins = ["raycrew.cluster_core.testing"]`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from raycrew.cluster_core.memory import read_node_memory
from raycrew.cluster_core.testing._fake import FakeCluster, check_cluster
from raycrew.cluster_core.testing._nodes import clean_up, connected, simulated_nodes

__all__ = [
    "LOCAL_NODE",
    "SEVERAL_NODES",
    "FakeCluster",
    "check_cluster",
    "clean_up",
    "connected",
    "local_ray",
    "local_ray_session",
    "ray_nodes",
    "ray_nodes_session",
    "simulated_nodes",
]

LOCAL_NODE: Mapping[str, Any] = {"num_cpus": 8}
SEVERAL_NODES: Sequence[Mapping[str, Any]] = [{"num_cpus": 8, "num_gpus": 4}] * 3


@pytest.fixture(scope="session")
def local_ray_session() -> Iterator[str]:
    """Address of a Ray cluster of one node of eight CPUs and the GPUs that there are, one per session."""
    with simulated_nodes([{**LOCAL_NODE, "num_gpus": len(read_node_memory().devices)}]) as cluster:
        yield cluster.address


@pytest.fixture(scope="session")
def ray_nodes_session() -> Iterator[str]:
    """Address of a Ray cluster of three nodes of eight CPUs and four made-up GPUs, one per session."""
    with simulated_nodes(SEVERAL_NODES) as cluster:
        yield cluster.address


@pytest.fixture
def local_ray(local_ray_session: str) -> Iterator[str]:
    """This process connected to a one-node Ray cluster; cleaned after the test."""
    with connected(local_ray_session):
        yield local_ray_session


@pytest.fixture
def ray_nodes(ray_nodes_session: str) -> Iterator[str]:
    """This process connected to a three-node Ray cluster with made-up GPUs; cleaned after the test."""
    with connected(ray_nodes_session):
        yield ray_nodes_session
