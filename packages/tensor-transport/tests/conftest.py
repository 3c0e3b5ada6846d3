"""One Ray cluster of two simulated nodes for the whole session, started when a test first asks for it.

Processes take seconds to start: what tests can share, they do.
"""

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

import pytest


@contextlib.contextmanager
def one_start_at_a_time():
    """Nodes race for ports when they start, those of another lane too."""
    with Path(tempfile.gettempdir(), f"raycrew-start-{os.getuid()}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def ray_cluster():
    """Two nodes of two CPUs each (custom resources `node0`, `node1`); this process is a driver on `node0`."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    if "RAY_TMPDIR" not in os.environ:
        os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="r", dir="/tmp")
    (Path(os.environ["RAY_TMPDIR"]) / "ray").mkdir(parents=True, exist_ok=True)
    options = {"num_cpus": 4, "object_store_memory": 150 * 2**20}
    # Spilling is tested on disks that have less than the usual twentieth left, too.
    head = {"include_dashboard": False, "_system_config": {"local_fs_capacity_threshold": 1.0}}
    for tries in (2, 1, 0):
        cluster = Cluster()
        try:
            with one_start_at_a_time():
                cluster.add_node(**options, **head, resources={"node0": 100})
                cluster.add_node(**options, resources={"node1": 100})
        except Exception as error:
            cluster.shutdown()
            if not tries or "timed out during startup" not in str(error):  # Ray allows 30 s
                raise
        else:
            break
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="session")
def peers(ray_cluster):
    """A process on each node, without a backend; nobody kills them."""
    from actors import ActorPeer

    return [ActorPeer(None, node) for node in ("node0", "node1")]


@pytest.fixture(scope="session")
def store_actors(ray_cluster):
    """A store on each node."""
    from raycrew.tensor_transport import ObjectStoreBackend

    backend = ObjectStoreBackend.start()
    yield backend
    backend.close()
    backend.close()


@pytest.fixture
def stores(store_actors):
    """The stores, empty before and after."""
    yield store_actors
    for node in store_actors.node_ids:
        store_actors.clear_node(node)
