"""Where large results lie while somebody only waits for them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from patience import PATIENCE_S, eventually
from ray.experimental import get_object_locations

from raycrew.cluster_core import RayVirtualCluster
from raycrew.worker_groups import RayWorkerGroup, wait_any

np = pytest.importorskip("numpy")


class Maker:
    def make(self, n_bytes):
        return np.zeros(n_bytes, np.uint8)


def nodes_of(call):
    return set(get_object_locations([call])[call]["node_ids"])


def test_who_only_waits_leaves_them_on_their_nodes(ray_nodes):
    here = ray.get_runtime_context().get_node_id()
    with (
        RayVirtualCluster([1] * 3, use_gpus=False, placement_group_strategy="SPREAD") as cluster,
        RayWorkerGroup(cluster, Maker, enable_load_balancing=True) as group,
        ThreadPoolExecutor(1) as beside,
    ):
        away = next(info for info in group.ranks if info.node_id != here)
        future = group.on(ranks=[away.rank]).call("make", 4 << 20)
        assert future.wait(PATIENCE_S) and future.done() and wait_any([future]) == [future]
        assert beside.submit(future.wait, PATIENCE_S).result(), "looks now and then"
        eventually(lambda: away.node_id in nodes_of(future[0]), "Ray has heard where it is")
        assert nodes_of(future[0]) == {away.node_id}
        assert future.get_results()[0].nbytes == 4 << 20
        eventually(lambda: here in nodes_of(future[0]), "Ray has heard that it is here, too")
