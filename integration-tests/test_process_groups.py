"""A process group over two worker groups on Ray: updates, a killed member, and its next generation."""

import pytest
from group_members import Member

from raycrew.cluster_core import RayVirtualCluster
from raycrew.tensor_transport.process_groups import GroupHost, form_group, member_names
from raycrew.worker_groups import RayWorkerGroup

WAIT_S = 120


def update(trainers, generators, value):
    """Rank 0 of the trainers sends to all others; what each receiver holds or says."""
    trainers.call("train", value).get_results(timeout=WAIT_S)
    manifest = f"version {value}"
    receivers = [trainers.on(ranks=[1]).call("receive", manifest), generators.call("receive", manifest)]
    sender = trainers.on(ranks=[0]).call("send", manifest)
    return sender, [one for call in receivers for one in call.get_results(timeout=WAIT_S)]


@pytest.mark.long  # in short: test_weight_updates, over gloo
@pytest.mark.hostile
def test_a_killed_generator_is_restarted_and_joins_the_next_generation(local_ray):
    with (
        RayVirtualCluster([2], use_gpus=False, max_colocated_worker_groups=2) as cluster,
        RayWorkerGroup(cluster, Member, name_prefix="trainer") as trainers,
        RayWorkerGroup(cluster, Member, name_prefix="generator") as generators,
    ):
        peers = {"trainer": trainers, "generator": generators}
        with GroupHost("weights", member_names(peers), backend="gloo") as host:
            assert form_group(host, peers) == [(rank, 1) for rank in range(4)]
            sender, found = update(trainers, generators, 1.0)
            sender.get_results(timeout=WAIT_S)
            assert found == [[[1.0], [1.0]]] * 3

            with pytest.raises(Exception, match=r"die|died|dead|exit"):
                generators.on(ranks=[1]).call("die").get_results(timeout=WAIT_S)
            trainers.call("train", 2.0).get_results(timeout=WAIT_S)
            alive = [
                trainers.on(ranks=[1]).call("receive", "version 2"),
                generators.on(ranks=[0]).call("receive", "version 2"),
            ]
            sender = trainers.on(ranks=[0]).call("send", "version 2")
            lost = [one for call in alive for one in call.get_results(timeout=WAIT_S)]
            assert lost == [("PeerLostError", ("generator/1",))] * 2
            with pytest.raises(Exception, match="generator/1"):
                sender.get_results(timeout=WAIT_S)
            assert generators.on(ranks=[0]).call("held").get_results(timeout=WAIT_S) == [[[1.0], [1.0]]]

            assert generators.restart_failed_workers() == [1]
            assert form_group(host, peers) == [(rank, 2) for rank in range(4)]
            sender, found = update(trainers, generators, 3.0)
            sender.get_results(timeout=WAIT_S)
            assert found == [[[3.0], [3.0]]] * 3
