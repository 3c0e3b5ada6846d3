import pytest

from raycrew.cluster_core import RayVirtualCluster
from raycrew.cluster_core._placement.options import check_options

pytestmark = pytest.mark.smoke

TABLE = {
    "no list": ({"bundle_ct_per_node_list": 8}, TypeError, "list of integers, not 8"),
    "a string": ({"bundle_ct_per_node_list": "88"}, TypeError, "list of integers"),
    "an empty list": ({"bundle_ct_per_node_list": []}, ValueError, r"\[\] ask for no bundle"),
    "only zeros": ({"bundle_ct_per_node_list": [0, 0]}, ValueError, "ask for no bundle"),
    "a negative count": ({"bundle_ct_per_node_list": [2, -1]}, ValueError, "-1 of node 1 is below 0"),
    "a fraction": ({"bundle_ct_per_node_list": [1.5]}, TypeError, "1.5 of node 0 is a float"),
    "a boolean": ({"bundle_ct_per_node_list": [True]}, TypeError, "True of node 0 is a bool"),
    "more than a node has": (
        {"bundle_ct_per_node_list": [9]},
        ValueError,
        "asks for 9 .* num_gpus_per_node=8",
    ),
    "unknown strategy": ({"placement_group_strategy": "TIGHT"}, ValueError, "'TIGHT' is none of PACK"),
    "no slots": ({"max_colocated_worker_groups": 0}, ValueError, "max_colocated_worker_groups=0 is below 1"),
    "too fine slots": ({"max_colocated_worker_groups": 10001}, ValueError, "10001 is above 10000"),
    "half a slot": ({"max_colocated_worker_groups": 0.5}, TypeError, "is an integer, not 0.5"),
    "no GPUs per node": ({"num_gpus_per_node": 0}, ValueError, "num_gpus_per_node=0 is below 1"),
    "ids without GPUs": ({"use_gpus": False, "gpu_ids": [0, 1]}, ValueError, "contradicts use_gpus=False"),
    "an id twice": ({"gpu_ids": [1, 1]}, ValueError, "names a device twice"),
    "an id out of range": ({"gpu_ids": [0, 8]}, ValueError, "8 is outside 0 to 7"),
    "a negative id": ({"gpu_ids": [0, -1]}, ValueError, "-1 is below 0"),
    "too few ids": ({"gpu_ids": [0]}, ValueError, "names 1 devices for 2 bundles"),
    "too few lists of ids": ({"gpu_ids": [[0, 1]] * 2}, ValueError, "2 lists for 1 nodes"),
    "one id": ({"gpu_ids": 5}, TypeError, "'auto', a list, or a list per node, not 5"),
    "a set of ids": ({"gpu_ids": {0, 1}}, TypeError, "a list per node, not {0, 1}"),
    "ids that are no integers": ({"gpu_ids": [0, 1.0]}, TypeError, "node 0 is an integer, not 1.0"),
    "ids and a list of ids": ({"gpu_ids": [0, [1]]}, TypeError, r"node 0 is an integer, not \[1\]"),
    "ids in words": ({"gpu_ids": "all"}, ValueError, "'all' is neither 'auto' nor a list"),
    "one port": ({"port_range": 5000}, TypeError, "pair of integers"),
    "a privileged port": ({"port_range": (80, 2000)}, ValueError, "outside 1024-65535"),
    "a reversed range": ({"port_range": (3000, 2000)}, ValueError, "reversed"),
    "no time": ({"timeout_s": -1}, ValueError, "timeout_s=-1 is not"),
    "endless": ({"timeout_s": float("inf")}, ValueError, "timeout_s=inf is not"),
    "a time in words": ({"timeout_s": "1m"}, TypeError, "timeout_s is a number, not '1m'"),
    "negative retries": ({"max_retries": -1}, ValueError, "max_retries=-1 is below 0"),
    "nothing in a bundle": ({"use_gpus": False, "cpus_per_bundle": 0}, ValueError, "hold nothing"),
    "negative CPUs": ({"cpus_per_bundle": -2}, ValueError, "cpus_per_bundle=-2"),
    "unknown backend": ({"communication_backend": "tcp"}, ValueError, "'tcp' is none of auto, nccl"),
    "uneven segments": ({"segment_size": 2}, ValueError, "segment_size 2 does not divide 1"),
    "two domains": ({"topology_strategy": {"a": "STRICT_PACK", "b": "STRICT_PACK"}}, ValueError, "one label"),
    "a soft domain": ({"topology_strategy": {"a": "PACK"}}, ValueError, "'PACK' is not STRICT_PACK"),
    "a word for a flag": ({"use_gpus": "no"}, TypeError, "use_gpus is True or False, not 'no'"),
    "a number for a flag": ({"unified": 1}, TypeError, "unified is True or False, not 1"),
    "no labels": ({"label_selector": "zone"}, TypeError, "label_selector is a mapping of labels, not 'zone'"),
    "no topology": ({"topology_strategy": "zone"}, TypeError, "topology_strategy is a mapping"),
    "an open list of labels": (
        {"label_selector": {"zone": "in(a"}},
        ValueError,
        "is not one of 'a', '!a', 'in",
    ),
    "a label without a name": ({"label_selector": {"": "x"}}, ValueError, "'': that is not the name"),
    "a label that Ray refuses": ({"label_selector": {"zone": "a b"}}, ValueError, "'a b' is not one of"),
    "an accelerator by number": ({"accelerator": 3}, TypeError, "name of a resource, not 3"),
    "no accelerator": ({"accelerator": "CPU"}, ValueError, "'CPU' is not the resource name"),
    "a name that is none": ({"name": 3}, TypeError, "name is a string, not 3"),
}


@pytest.mark.parametrize("case", TABLE)
def test_bad_input_is_refused_before_ray_is_touched(case):
    """No Ray is running here: whatever got as far as Ray would raise a ClusterError."""
    arguments, error, message = TABLE[case]
    with pytest.raises(error, match=message):
        RayVirtualCluster(**{"bundle_ct_per_node_list": [2], **arguments})


def options(counts, **arguments):
    return check_options(counts, True, 1, 8, "", "STRICT_PACK", **arguments)


def test_forms_of_gpu_ids():
    assert options([2, 0, 2], gpu_ids=[4, 5]).gpu_ids == ((4, 5), (), (4, 5))
    assert options([2, 1], gpu_ids=[[4, 5], [0]]).gpu_ids == ((4, 5), (0,))
    assert options([2], gpu_ids="auto").gpu_ids == "auto"


def test_colocation_means_two_slots_unless_more_are_asked_for():
    colocated = options([1], enable_colocation=True)
    assert (colocated.slots, dict(colocated.request.bundle)) == (2, {"CPU": 2.0, "GPU": 1.0})
    assert check_options([1], True, 3, 8, "", "PACK", enable_colocation=True).slots == 3


def test_a_topology_strategy_makes_all_nodes_one_segment():
    request = options([1, 0, 1], topology_strategy={"zone": "STRICT_PACK", "ray.io/node-id": "PACK"}).request
    assert (request.segment_size, request.domain_label, request.strategy) == (2, "zone", "PACK")


def test_other_accelerators_by_resource_name():
    assert dict(options([1], accelerator="NPU").request.bundle) == {"CPU": 1.0, "NPU": 1.0}


def test_the_retries_of_the_field_are_honoured():
    variable = "NRL_VIRTUAL_CLUSTER_MAX_RETRIES"
    assert options([1], environ={}).max_retries == 6
    assert options([1], environ={variable: "2"}).max_retries == 2
    assert options([1], environ={variable: "2"}, max_retries=4).max_retries == 4
    with pytest.raises(ValueError, match="'many' is not a number"):
        options([1], environ={variable: "many"})
