import pytest

from raycrew.cluster_core import RayVirtualCluster
from raycrew.worker_groups import close_fan_out

pytest_plugins = ["raycrew.cluster_core.testing"]


@pytest.fixture
def pool():
    """The pool of `fan_out` is closed after the test."""
    yield
    close_fan_out()


@pytest.fixture(scope="module")
def warm_pool():
    """The pool of `fan_out` stays for all tests of a module."""
    yield
    close_fan_out()


@pytest.fixture
def cluster(local_ray):
    """Two bundles of one CPU; a module may have another one."""
    with RayVirtualCluster([2], use_gpus=False) as made:
        yield made
