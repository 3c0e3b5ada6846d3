"""For tests: a cluster without Ray, pytest fixtures with Ray, and what every `Cluster` must do.

Load the fixtures with `pytest_plugins = ["raycrew.cluster_core.testing"]`.
"""

import contextlib
import fcntl
import gc
import itertools
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from raycrew.cluster_core._placement import LedgerClaim, SlotLedger
from raycrew.cluster_core._topology import Bundle, Rendezvous
from raycrew.cluster_core.errors import BundlesOccupiedError, ClusterClosedError
from raycrew.cluster_core.protocols import Cluster

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOCAL_NODE: Mapping[str, Any] = {"num_cpus": 8}
SEVERAL_NODES: Sequence[Mapping[str, Any]] = [{"num_cpus": 8, "num_gpus": 4}] * 3
_STORE_BYTES = 80 << 20
_STARTS = 3
_GAVE_UP = "timed out during startup"
_FAST_DEATH = {  # A killed node is noticed in about a second instead of twelve; a slow one is not dead.
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 3,
}


class FakeCluster:
    """A `Cluster` that needs no Ray: its nodes are numbers, and functions run in this process.

    Args:
        bundle_ct_per_node_list: Bundles per logical node; zeros leave holes in the node numbers.
        use_gpus: Whether each bundle holds a GPU besides its CPUs.
        max_colocated_worker_groups: Slots per bundle.
        cpus_per_bundle: CPUs of each bundle; one per slot when not given.
    """

    def __init__(
        self,
        bundle_ct_per_node_list: Sequence[int] = (2,),
        *,
        use_gpus: bool = False,
        max_colocated_worker_groups: int = 1,
        cpus_per_bundle: float | None = None,
    ) -> None:
        self.closed = False
        resources = {"CPU": float(cpus_per_bundle or max_colocated_worker_groups)}
        if use_gpus:
            resources["GPU"] = 1.0
        nodes = [node for node, count in enumerate(bundle_ct_per_node_list) for _ in range(count)]
        seats = [Bundle(i, node, f"{node:056x}", "127.0.0.1", resources) for i, node in enumerate(nodes)]
        self._ledger = SlotLedger(seats, max_colocated_worker_groups)
        self._ports = itertools.count(20_000)

    @property
    def bundles(self) -> Sequence[Bundle]:
        """All bundles, ordered by (node, device index)."""
        return self._open().bundles

    def claim(self, indices: Sequence[int] | None, holder: str) -> LedgerClaim:
        """Take one slot on each named bundle (all of them for None) for `holder`.

        Raises:
            ValueError: An index is out of range or repeated.
            BundlesOccupiedError: A bundle has no free slot.
        """
        ledger = self._open()
        return LedgerClaim(lambda: ledger, ledger.take(indices, holder), lambda _seat: "DEFAULT", self._open)

    def rendezvous(self, bundle_index: int = 0, n_ports: int = 1) -> Rendezvous:
        """Hand out port numbers that this cluster never handed out before; nothing listens on them."""
        bundle = self.bundles[bundle_index]
        return Rendezvous(bundle.node_id, bundle.node_address, tuple(itertools.islice(self._ports, n_ports)))

    def run_on_each_node(self, fn: Callable[[], T]) -> Iterator[tuple[str, T]]:
        """Run `fn` once per node, here and one after the other."""
        for node_id in dict.fromkeys(bundle.node_id for bundle in self.bundles):
            yield node_id, fn()

    def holders(self) -> dict[int, tuple[str, ...]]:
        """Who holds slots, by bundle index."""
        return self._ledger.holders()

    def shutdown(self) -> None:
        """End the cluster; idempotent."""
        self.closed = True

    def __enter__(self) -> "FakeCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _open(self) -> SlotLedger:
        if self.closed:
            raise ClusterClosedError("this cluster was shut down")
        return self._ledger


def check_cluster(cluster: Cluster) -> None:
    """Check what every `Cluster` must do; `cluster` has no claims and one slot per bundle.

    Raises:
        AssertionError: It does something else; the message says what.
    """
    bundles = cluster.bundles
    _check([b.index for b in bundles] == list(range(len(bundles))), "bundles are not numbered in their order")
    _check(
        [b.node_index for b in bundles] == sorted(b.node_index for b in bundles),
        "bundles are not in node order",
    )
    whole = cluster.claim(None, "whole")
    _check(len(whole.bundles) == len(bundles), "a claim on None is not a claim on all bundles")
    _check(_refuses(cluster, [0], "late"), "a full bundle took one claim more")
    whole.release()
    whole.release()
    one = cluster.claim([len(bundles) - 1], "one")
    _check(one.bundles[0].index == len(bundles) - 1, "a claim is not on the bundle that was named")
    one.check()
    options = set(one.actor_options(0))
    _check(
        options >= {"num_cpus", "num_gpus", "resources", "scheduling_strategy"},
        f"actor options are only {options}",
    )
    one.release()
    for indices in ([len(bundles)], [-1], [0, 0]):
        _check(_refuses(cluster, indices, "wrong", ValueError), f"bundle indices {indices} were taken")
    first, second = cluster.rendezvous(0, 2), cluster.rendezvous(0, 1)
    _check(first.node_id == bundles[0].node_id, "the rendezvous is not on the bundle's node")
    _check(len({*first.ports, *second.ports}) == 3, "a port was handed out twice")
    nodes = [node_id for node_id, result in cluster.run_on_each_node(_three) if result == 3]
    _check(sorted(nodes) == sorted({b.node_id for b in bundles}), f"a function ran on {nodes}")


def _three() -> int:
    return 3


def _refuses(
    cluster: Cluster, indices: Sequence[int], holder: str, error: type[Exception] = BundlesOccupiedError
) -> bool:
    try:
        cluster.claim(indices, holder).release()
    except error:
        return True
    return False


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


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
        cluster = _no_nodes()
        try:
            with _one_start_at_a_time():
                _add(cluster, nodes)
        except Exception as error:
            cluster.shutdown()
            if not tries or _GAVE_UP not in str(error):
                raise
            logger.warning("nodes are started once more: %s", error)
        else:
            break
    return cluster


def _no_nodes() -> Any:
    from ray import cluster_utils

    make: Any = cluster_utils.Cluster
    return make()


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
        ray.shutdown()
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    try:
        yield
    finally:
        clean_up()


def clean_up(timeout_s: float = 60.0) -> None:
    """Kill named actors, remove placement groups, and wait until all resources of all nodes are free.

    Raises:
        TimeoutError: Something still holds resources, even after a new connection to the cluster.
    """
    import ray
    from ray.util.placement_group import PlacementGroup, placement_group_table

    from raycrew.cluster_core._ray import withdraw_group

    for actor in ray.util.list_named_actors(all_namespaces=True):
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
    for group_id, entry in placement_group_table().items():
        if entry["state"] != "REMOVED":
            withdraw_group(PlacementGroup(ray.PlacementGroupID.from_hex(group_id)))
    gc.collect()
    if not _all_free(timeout_s / 6):
        address = ray.get_runtime_context().gcs_address
        ray.shutdown()
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
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


@pytest.fixture(scope="session")
def local_ray_session() -> Iterator[str]:
    """Address of a Ray cluster of one node with eight logical CPUs, started once per session."""
    with simulated_nodes([LOCAL_NODE]) as cluster:
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
