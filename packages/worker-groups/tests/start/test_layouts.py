"""Groups on clusters of other shapes."""

import pytest
from patience import read_pids
from workers import Worker

from raycrew.cluster_core import RayVirtualCluster
from raycrew.worker_groups import RayWorkerBuilder, RayWorkerGroup, WorkerFailureError


def test_two_groups_share_bundles_and_results_go_from_one_to_the_other(local_ray, tmp_path):
    with (
        RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=2) as cluster,
        RayWorkerGroup(cluster, Worker) as one,
        RayWorkerGroup(cluster, Worker, name_prefix="two") as two,
    ):
        assert {p.share for p in (*one.placements, *two.placements)} == {0.5}
        assert one.master_port != two.master_port
        pids = one.call("pid").get_results(), two.call("pid").get_results()
        assert not set(pids[0]) & set(pids[1])
        two.call("keep", one.call("note", str(tmp_path))).get_results()
        assert set(read_pids(tmp_path)) == set(pids[1])


def test_devices_are_learnt_from_the_workers(ray_nodes):
    with (
        RayVirtualCluster([3, 3], use_gpus=True, num_gpus_per_node=4) as cluster,
        RayWorkerGroup(cluster, Worker) as group,
    ):
        assert [(r.node_rank, r.local_rank) for r in group.ranks] == [
            (n, r) for n in (0, 1) for r in (0, 1, 2)
        ]
        for info, bundle in zip(group.ranks, cluster.bundles, strict=True):
            assert info.bundle_index == bundle.index
            assert (info.node_id, info.device_index) == (bundle.node_id, bundle.device_index)
        for node in (group.ranks[:3], group.ranks[3:]):
            devices = [info.device_index for info in node]
            assert devices == sorted(set(devices))
        really = [(info.node_id, [str(info.device_index)]) for info in group.ranks]
        assert group.call("really").get_results() == really
        with pytest.raises(WorkerFailureError, match="cuda device") as caught:
            group.call("fail_on", [4]).get_results()
        assert (caught.value.node_id, [str(caught.value.device_index)]) == really[4]
        here = group.call("where").get_results()
        assert {(w.device_kind, w.local_device_index) for w in here} == {("cuda", 0)}
        group.shutdown()
        with RayWorkerGroup(cluster, Worker, bundle_indices_list=[[0, 3], [4, 1]]) as tied:
            assert tied.tied_workers_groups == [[0, 1], [2, 3]]
            assert [info.node_rank for info in tied.ranks] == [0, 1, 1, 0]
            assert [info.bundle_index for info in tied.ranks] == [0, 3, 4, 1]
            leaders = tied.run_all_workers_single_data("nap", 0, only_on="tied_leader")
            assert leaders.get_results() == [0, 2]


@pytest.mark.long  # in short: test_devices_are_learnt_from_the_workers
def test_ranks_of_a_group_without_devices_are_those_of_a_group_with_them(ray_nodes):
    """Devices left to a worker's own children: the order is the same whoever starts first."""
    with RayVirtualCluster([4], max_colocated_worker_groups=2) as cluster:
        builder = RayWorkerBuilder(Worker).options(num_gpus=0)
        with RayWorkerGroup(cluster, builder) as without:
            assert [info.device_index for info in without.ranks] == [None] * 4
            known = [bundle.device_index for bundle in cluster.bundles]
            assert known == [0, 1, 2, 3], "learnt, though nobody on them could tell"
            places = [info.bundle_index for info in without.ranks]
            with RayWorkerGroup(cluster, Worker, name_prefix="with") as having:
                assert [info.bundle_index for info in having.ranks] == places
                assert [info.device_index for info in having.ranks] == known
            assert [place.bundle_index for place in without.placements] == places


def test_two_groups_share_devices(ray_nodes):
    with (
        RayVirtualCluster([2], use_gpus=True, num_gpus_per_node=4, max_colocated_worker_groups=2) as cluster,
        RayWorkerGroup(cluster, Worker) as one,
        RayWorkerGroup(cluster, Worker, name_prefix="two") as two,
    ):
        assert {p.share for p in (*one.placements, *two.placements)} == {0.5}
        devices = [info.device_index for info in one.ranks]
        assert devices == [info.device_index for info in two.ranks]
        assert len(set(devices)) == 2
