"""Ray clusters of several made-up nodes on this machine, shared by tests and cleaned between them."""

import contextlib
import fcntl
import gc
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_STAYING = "raycrew-watch-"
_STORE_BYTES = 80 << 20
_STARTS = 3
_GAVE_UP = "timed out during startup"
_FAST_DEATH = {  # A killed node is noticed in about a second instead of twelve; a slow one is not dead.
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 3,
}


@contextlib.contextmanager
def simulated_nodes(nodes: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """Run a Ray cluster of several nodes on this machine, with as many made-up CPUs and GPUs as they say.

    Args:
        nodes: Arguments of `ray.cluster_utils.Cluster.add_node` for each node: `num_cpus`, `num_gpus`,
            `resources`, `labels`. The first is the head.

    Yields:
        The `ray.cluster_utils.Cluster`: it has an `address`, and `add_node` and `remove_node`.
    """
    import ray

    with _temporary_folder():
        cluster = _started(nodes)
        try:
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def _started(nodes: Sequence[Mapping[str, Any]]) -> Any:
    """A cluster, tried again where Ray gave a node up: it allows 30 s, too little on a busy machine."""
    for tries in reversed(range(_STARTS)):
        cluster = no_nodes()
        try:
            _add(cluster, nodes)
        except Exception as error:
            cluster.shutdown()
            if not tries or _GAVE_UP not in str(error):
                raise
            logger.warning("nodes are started once more: %s", error)
        else:
            break
    return cluster


def no_nodes() -> Any:
    """A cluster without nodes; each that is added starts while no other does, of any process of this user."""
    from ray import cluster_utils

    make: Any = cluster_utils.Cluster
    cluster = make()
    add_node = cluster.add_node

    def add_alone(**options: Any) -> Any:
        with _one_start_at_a_time():
            return add_node(**options)

    cluster.add_node = add_alone
    return cluster


def _add(cluster: Any, nodes: Sequence[Mapping[str, Any]]) -> None:
    common = {"object_store_memory": _STORE_BYTES}
    head = {"include_dashboard": False, "dashboard_port": 0, "_system_config": _FAST_DEATH}
    cluster.add_node(**{**common, **head, **nodes[0]})
    for node in nodes[1:]:
        cluster.add_node(**{**common, **node})
    cluster.wait_for_nodes()


@contextlib.contextmanager
def _one_start_at_a_time() -> Iterator[None]:
    """Nodes race for ports when they start, those of other processes too."""
    path = Path(tempfile.gettempdir(), f"raycrew-start-{os.getuid()}.lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect this process to a Ray cluster; a connection to another one is closed first."""
    import ray

    if not ray.is_initialized() or ray.get_runtime_context().gcs_address != address:
        _connect(address)
    try:
        yield
    finally:
        if not ray.is_initialized():  # else Ray would start a cluster of its own, to be cleaned up
            _connect(address)
        clean_up()


def _connect(address: str) -> None:
    import ray

    ray.shutdown()
    ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)


def clean_up(timeout_s: float = 60.0) -> None:
    """Kill named actors, remove placement groups, and wait until all resources of all nodes are free.

    Actors that hold nothing and stay for the next group, as their names say by their beginning, are left.

    Raises:
        TimeoutError: Something still holds resources, even after a new connection to the cluster.
    """
    import ray
    from ray.util.placement_group import PlacementGroup, placement_group_table

    from raycrew.cluster_core._ray import withdraw_group

    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].startswith(_STAYING):
            continue
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
    for group_id, entry in placement_group_table().items():
        if entry["state"] != "REMOVED":
            withdraw_group(PlacementGroup(ray.PlacementGroupID.from_hex(group_id)))
    gc.collect()
    if not _all_free(timeout_s / 6):
        _connect(ray.get_runtime_context().gcs_address)
        if not _all_free(timeout_s):
            raise TimeoutError(f"the test left resources in use: {_in_use()}")


def _in_use() -> dict[str, dict[str, float]]:
    from raycrew.cluster_core._ray import node_states

    used = {
        node.node_id: {
            name: total - node.free[name]
            for name, total in node.total.items()
            if name not in ("memory", "object_store_memory") and node.free[name] < total
        }
        for node in node_states()
    }
    return {node_id: amounts for node_id, amounts in used.items() if amounts}


def _all_free(timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while _in_use():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextlib.contextmanager
def _temporary_folder() -> Iterator[None]:
    """Give Ray a short folder of its own: its socket paths are limited to 107 bytes."""
    before = os.environ.get("RAY_TMPDIR")
    with contextlib.ExitStack() as stack:
        if before is None:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="rc", dir="/tmp", ignore_cleanup_errors=True)
            )
            os.environ["RAY_TMPDIR"] = folder
        Path(os.environ["RAY_TMPDIR"], "ray").mkdir(parents=True, exist_ok=True)
        try:
            yield
        finally:
            if before is None:
                os.environ.pop("RAY_TMPDIR", None)
