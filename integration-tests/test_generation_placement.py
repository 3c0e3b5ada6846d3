"""Where an engine's own processes are with the executor `ray`; the devices here are made up."""

import json

import pytest

pytest.importorskip("transformers")

from generation_echo import MODEL
from generation_stage import EXAMPLE  # noqa: F401  # finds the example

from generation import EngineOptions, RefusedError, start_generators
from generation.lending import Place, engine_variables
from raycrew.cluster_core import RayVirtualCluster
from raycrew.cluster_core.testing import FakeCluster
from raycrew.tensor_transport import WeightDirectory


def test_an_engine_is_told_of_its_own_bundles():
    places = [Place("a", 3, 1, 0.5), Place("a", 0, 1, 0.5), Place("b", 0, 1, 0.5), Place("b", 1, 1, 0.5)]
    assert engine_variables(places, 2) == [
        {"VLLM_RAY_BUNDLE_INDICES": "3,0", "VLLM_RAY_PER_WORKER_GPUS": "0.5"},
        {"VLLM_RAY_BUNDLE_INDICES": "0,1", "VLLM_RAY_PER_WORKER_GPUS": "0.5"},
    ]
    with pytest.raises(RefusedError, match="one placement group"):
        engine_variables(places, 4)
    over_nodes = [Place("a", 0, 1, 1, "x"), Place("a", 1, 1, 1, "y")]
    assert engine_variables(over_nodes, 2)[0]["VLLM_RAY_BUNDLE_INDICES"] == "0,1"
    assert len(engine_variables(over_nodes, 1, is_updated=True)) == 2
    with pytest.raises(RefusedError, match="on other nodes"):
        engine_variables(over_nodes, 2, is_updated=True)
    for devices in (0, 0.5, 2):
        with pytest.raises(RefusedError, match="one GPU each"):
            engine_variables([Place("a", 0, 1, 1), Place("a", 1, devices, devices)], 2)


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        (FakeCluster([2], use_gpus=True), "which has 1 GPU: use executor='ray'"),
        (FakeCluster([1, 1]), "on one node"),
        (FakeCluster([3, 1]), "on one node"),
    ],
)
def test_children_of_one_worker_are_refused_where_they_can_not_be_its_engine(cluster, says):
    with pytest.raises(RefusedError, match=says):
        start_generators(cluster, "vllm", EngineOptions(MODEL, tensor_parallel=2))
    assert not cluster.holders()


def spread(cluster, size):
    """Where each engine's parts are."""
    options = EngineOptions(MODEL, tensor_parallel=size, executor="ray")
    with start_generators(cluster, "generation_spread.SpreadWorker", options) as generators:
        return [json.loads(found.split("; it holds")[0]) for found in generators.call("explain")]


def nodes_of(found):
    return [node for node, _ in found["places"]]


@pytest.mark.long
def test_an_engine_spans_nodes_in_the_groups_own_bundles(ray_nodes):
    with RayVirtualCluster([2, 2], unified=True) as cluster:
        (found,) = spread(cluster, 4)
        assert nodes_of(found) == [bundle.node_id for bundle in cluster.bundles]
    assert len({(node, *device) for node, device in found["places"]}) == 4, "each has a device of its own"
    assert found["own"] == [], "the worker has left all of them to its engine"
    assert found["hidden"] is None, "and sees them"


@pytest.mark.long
def test_engines_side_by_side_share_what_others_left(ray_nodes):
    with RayVirtualCluster([2, 2], max_colocated_worker_groups=2) as cluster:
        first, second = spread(cluster, 2)
        assert [*nodes_of(first), *nodes_of(second)] == [bundle.node_id for bundle in cluster.bundles]


@pytest.mark.long
def test_bundles_that_an_engine_can_not_be_on_are_free_again(ray_nodes):
    with RayVirtualCluster([2, 2]) as cluster:
        with pytest.raises(RefusedError, match="unified=True"):
            spread(cluster, 4)
        assert not cluster.holders()
        assert len(spread(cluster, 2)) == 2


@pytest.mark.long
def test_weights_that_would_not_reach_an_engines_processes_are_refused_before_it_starts(ray_nodes):
    options = EngineOptions(MODEL, tensor_parallel=2, executor="ray")
    given = {"directory": WeightDirectory.local()}
    with RayVirtualCluster([2], placement_group_strategy="STRICT_SPREAD") as cluster:
        with pytest.raises(RefusedError, match="on other nodes"):
            start_generators(cluster, "generation_spread.SpreadWorker", options, worker_options=given)
        assert not cluster.holders()
