"""The main objects have examples in their docstrings, and these run as they stand there."""

import doctest
import functools
import importlib
import math
import os
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import close_fan_out
from raycrew.worker_groups.testing import InProcessGroup

CLUSTER_CORE = (
    *("BundleSpec", "NodeState", "PlacementRequest", "RayVirtualCluster", "init_ray", "lease_ports"),
    "plan_cluster",
)
WORKER_GROUPS = (
    *("GroupHandle", "LoadBalancer", "MultiWorkerFuture", "NamedSharding", "PhaseManager"),
    *(
        "RayWorkerBuilder",
        "RayWorkerGroup",
        "SampleQueue",
        "current_worker",
        "fan_out",
        "fan_out_as_completed",
        "sharded",
    ),
)
SCHEDULING = ("Job", "RayRPCServer", "RayScheduler", "SchedulingSpec")
SERVICES = ("AppServer", "Endpoint", "Gateway", "Proxy", "Service")
TENSOR_TRANSPORT = (
    *("BatchedDataDict", "InlineBackend", "PackedTensor", "RTensor", "ShardRegistry", "pack", "remotize"),
)
VENV_MANAGER = ("EnvironmentSpec", "get_actor_python_env", "register_actor_environment")
PUBLIC = {
    name: getattr(importlib.import_module(f"raycrew.{package}"), name)
    for package, names in (
        ("cluster_core", CLUSTER_CORE),
        ("worker_groups", WORKER_GROUPS),
        ("worker_groups.scheduling", SCHEDULING),
        ("worker_groups.services", SERVICES),
        ("tensor_transport", TENSOR_TRANSPORT),
        ("venv_manager", VENV_MANAGER),
    )
    for name in names
}
NAMES = {**PUBLIC, "math": math, "os": os, "torch": importlib.import_module("torch")}

#: The main objects: those without Ray, those of groups, and those that share one cluster.
ALONE = (
    *(
        "BatchedDataDict",
        "Endpoint",
        "EnvironmentSpec",
        "Job",
        "NamedSharding",
        "PackedTensor",
        "RTensor",
        "RayRPCServer",
    ),
    *("SampleQueue", "lease_ports", "pack", "plan_cluster", "register_actor_environment"),
)
OF_GROUPS = (
    *(
        "AppServer",
        "Gateway",
        "GroupHandle",
        "LoadBalancer",
        "MultiWorkerFuture",
        "PhaseManager",
        "RayScheduler",
    ),
    *("RayWorkerBuilder", "RayWorkerGroup", "current_worker", "sharded"),
)
ON_RAY = ("BundleSpec", "RayVirtualCluster", "fan_out", "fan_out_as_completed", "init_ray")


def run(name: str, **more: Any) -> None:
    """Run the examples of one object as doctest does."""
    found = doctest.DocTestParser().get_doctest(
        PUBLIC[name].__doc__ or "", {**NAMES, **more, "__name__": "__main__"}, name, None, None
    )
    assert found.examples, f"{name} has no example"
    told: list[str] = []
    outcome = doctest.DocTestRunner().run(found, out=told.append)
    assert not outcome.failed, "".join(told)


@pytest.mark.parametrize("name", ALONE)
def test_examples_run(name: str) -> None:
    run(name)


@pytest.mark.parametrize("name", OF_GROUPS)
def test_examples_of_groups_run_in_one_process_as_on_ray(name: str) -> None:
    scheduler = functools.partial(PUBLIC["RayScheduler"], group_class=InProcessGroup)
    groups = {"RayWorkerGroup": InProcessGroup, "RayScheduler": scheduler}
    run(name, cluster=FakeCluster([2], max_colocated_worker_groups=2), urllib=urllib, **groups)


@pytest.fixture(scope="module")
def connected() -> Iterator[None]:
    """One cluster for all of them."""
    with PUBLIC["init_ray"]("local", num_cpus=4, object_store_memory=100 << 20):
        yield
        close_fan_out()


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize("name", ("Proxy", "Service"))
def test_examples_of_services_run_on_ray(name: str) -> None:
    with PUBLIC["RayVirtualCluster"]([2], use_gpus=False) as cluster:
        run(name, cluster=cluster, sys=sys, urllib=urllib)


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize("name", ON_RAY)
def test_examples_run_on_ray(name: str) -> None:
    run(name)
