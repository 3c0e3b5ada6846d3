import ast
import inspect
import pickle
import textwrap
from dataclasses import MISSING, FrozenInstanceError, fields

import pytest
from arguments import options_of

from raycrew.cluster_core import BundleSpec, RayVirtualCluster
from raycrew.cluster_core._placement.options import ClusterOptions

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
        {"bundle_ct_per_node_list": [9], "num_gpus_per_node": 8},
        ValueError,
        r"asks for 9 .* num_gpus_per_node=8; STRICT_PACK .* \[5, 4\] or placement_group_strategy='PACK'",
    ),
    "unknown strategy": ({"placement_group_strategy": "TIGHT"}, ValueError, "'TIGHT' is none of PACK"),
    "no slots": ({"max_colocated_worker_groups": 0}, ValueError, "max_colocated_worker_groups=0 is below 1"),
    "too fine slots": ({"max_colocated_worker_groups": 10001}, ValueError, "10001 is above 10000"),
    "half a slot": ({"max_colocated_worker_groups": 0.5}, TypeError, "is an integer, not 0.5"),
    "no GPUs per node": ({"num_gpus_per_node": 0}, ValueError, "num_gpus_per_node=0 is below 1"),
    "ids without GPUs": ({"use_gpus": False, "gpu_ids": [0, 1]}, ValueError, "contradicts use_gpus=False"),
    "an id twice": ({"gpu_ids": [1, 1]}, ValueError, "names a device twice"),
    "an id out of range": ({"gpu_ids": [0, 8], "num_gpus_per_node": 8}, ValueError, "8 is outside num_gpus"),
    "a negative id": ({"gpu_ids": [0, -1]}, ValueError, "-1 is below 0"),
    "ids where bundles may lie anywhere": (
        {"gpu_ids": [0, 1], "placement_group_strategy": "PACK"},
        ValueError,
        "needs STRICT_PACK, not PACK:",
    ),
    "ids where bundles are spread": (
        {"gpu_ids": [0, 1], "placement_group_strategy": "SPREAD"},
        ValueError,
        "needs STRICT_PACK, not SPREAD:",
    ),
    "no ids": ({"gpu_ids": []}, ValueError, "names 0 devices for 2 bundles"),
    "ids where bundles are each on a node of its own": (
        {"gpu_ids": [0, 1], "placement_group_strategy": "STRICT_SPREAD"},
        ValueError,
        "needs STRICT_PACK, not STRICT_SPREAD:",
    ),
    "ids in other words": ({"gpu_ids": "each"}, ValueError, "'each' is neither 'auto' nor a list"),
    "a domain that nodes are spread over": (
        {"topology_strategy": {"zone": "STRICT_SPREAD"}},
        ValueError,
        "'STRICT_SPREAD' is not STRICT_PACK, the only one for a domain",
    ),
    "a domain that is left when it is full": (
        {"topology_strategy": {"zone": "PACK"}},
        ValueError,
        "'PACK' is not STRICT_PACK, the only one for a domain",
    ),
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
    "no specs": ({"bundle_specs": "large"}, TypeError, "bundle_specs is a BundleSpec or a list of them"),
    "specs of other nodes": ({"bundle_specs": [BundleSpec()] * 2}, ValueError, "2 entries for 1 nodes"),
    "too few specs": ({"bundle_specs": [[BundleSpec()]]}, ValueError, "node 0 has 1 entries for 2 bundles"),
    "a dict for a spec": ({"bundle_specs": [[{}, {}]]}, TypeError, "node 0 has {}, which is no BundleSpec"),
    "specs and CPUs": (
        {"bundle_specs": BundleSpec(), "cpus_per_bundle": 2},
        ValueError,
        "cpus_per_bundle has no meaning",
    ),
    "specs and ids": (
        {"bundle_specs": BundleSpec(gpus=1), "gpu_ids": [0, 1]},
        ValueError,
        "not of bundle_specs",
    ),
    "specs with GPUs and none": (
        {"bundle_specs": BundleSpec(gpus=1), "use_gpus": False},
        ValueError,
        "gpus=1.* contradicts use_gpus=False",
    ),
    "more devices than a node has": (
        {"bundle_specs": BundleSpec(gpus=5), "num_gpus_per_node": 8},
        ValueError,
        "node 0 asks for 10 GPU",
    ),
    "a bundle with more devices than a node has": (
        {
            "bundle_specs": [[BundleSpec(gpus=1), BundleSpec(gpus=9)]],
            "num_gpus_per_node": 8,
            "placement_group_strategy": "PACK",
        },
        ValueError,
        "a bundle of node 0 asks for 9 GPU, more than num_gpus_per_node=8",
    ),
    "one and a half devices per slot": (
        {"bundle_specs": BundleSpec(gpus=3), "max_colocated_worker_groups": 2},
        ValueError,
        "for 2 slots: 1.5 devices are neither",
    ),
    "two thirds of a device per slot": (
        {"bundle_specs": BundleSpec(gpus=2), "max_colocated_worker_groups": 3},
        ValueError,
        "for 3 slots: parts of 0.667 do not fill whole devices; take 2 slots or a multiple",
    ),
    "the accelerator twice": (
        {"bundle_specs": BundleSpec(resources={"NPU": 1}), "accelerator": "NPU"},
        ValueError,
        "NPU is the cluster's accelerator, which gpus counts",
    ),
    "labels of other nodes": ({"label_selector": [{}, {}]}, ValueError, "2 entries for 1 nodes"),
    "labels that are none": ({"label_selector": ["a"]}, TypeError, "label_selector of node 0 is a mapping"),
    "a list for an order": ({"node_order": ["a"]}, TypeError, "a mapping of node ids to ranks or a function"),
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


def test_a_node_may_be_filled_to_its_last_device():
    assert options_of([8], num_gpus_per_node=8).request.bundle_counts == (8,)
    assert options_of([1], num_gpus_per_node=1).request.bundle_counts == (1,)
    assert options_of([2], num_gpus_per_node=8, gpu_ids=[6, 7]).devices == ((6, 7),)
    for specs in ([BundleSpec(gpus=8)], [[BundleSpec(gpus=5), BundleSpec(gpus=3)]]):
        count = len(specs[0]) if isinstance(specs[0], list) else 1
        told = options_of([count], num_gpus_per_node=8, bundle_specs=specs).request
        assert sum(one["GPU"] for one in told.bundles[0]) == 8


def test_a_bundle_may_have_as_many_slots_as_ray_can_count():
    assert options_of([1], True, 10_000).slots == 10_000


@pytest.mark.parametrize(("gpus", "slots"), [(0.3, 2), (0.5, 3), (1, 3), (2, 2), (2, 4), (4, 2), (0, 3)])
def test_shares_of_whole_devices_or_of_one_are_taken(gpus, slots):
    BundleSpec(gpus=gpus).check_shares(slots)


def test_forms_of_gpu_ids():
    assert options_of([2, 0, 2], gpu_ids=[4, 5]).devices == ((4, 5), (), (4, 5))
    assert options_of([2, 1], gpu_ids=[[4, 5], [0]]).devices == ((4, 5), (0,))
    assert options_of([2], gpu_ids=[[4, 5]]).devices == ((4, 5),)
    assert options_of([2], gpu_ids="auto").devices == "auto"


def test_colocation_means_two_slots_unless_more_are_asked_for():
    colocated = options_of([1], enable_colocation=True)
    assert (colocated.slots, dict(colocated.request.bundle)) == (2, {"CPU": 2.0, "GPU": 1.0})
    assert options_of([1], True, 3, enable_colocation=True).slots == 3


def test_a_topology_strategy_makes_all_nodes_one_segment():
    request = options_of(
        [1, 0, 1], topology_strategy={"zone": "STRICT_PACK", "ray.io/node-id": "PACK"}
    ).request
    assert (request.segment_size, request.domain_label, request.strategy) == (2, "zone", "PACK")


def test_what_a_topology_strategy_says_of_nodes_counts_in_place_of_the_strategy():
    """Also for what is checked against the strategy: devices by number, and how many of them a node has."""
    strict, loose = ({"ray.io/node-id": wish} for wish in ("STRICT_PACK", "PACK"))
    told = options_of([2], placement_group_strategy="PACK", topology_strategy=strict, gpu_ids=[0, 1])
    assert (told.request.strategy, told.devices) == ("STRICT_PACK", ((0, 1),))
    assert options_of([8], topology_strategy=loose, num_gpus_per_node=4).request.strategy == "PACK"
    for arguments, message in (
        ({"gpu_ids": [0, 1], "topology_strategy": loose}, "gpu_ids needs STRICT_PACK, not PACK"),
        (
            {
                "num_gpus_per_node": 1,
                "placement_group_strategy": "PACK",
                "topology_strategy": strict,
            },
            "node 0 asks for 2 bundles of one GPU each, more than num_gpus_per_node=1; STRICT_PACK keeps",
        ),
        ({"topology_strategy": {"ray.io/node-id": "TIGHT"}}, "strategy 'TIGHT' is none of PACK"),
    ):
        with pytest.raises(ValueError, match=message):
            options_of([2], **arguments)


def test_other_accelerators_by_resource_name():
    for name in ("APU", "NPU"):
        assert dict(options_of([1], accelerator=name).request.bundle) == {"CPU": 1.0, name: 1.0}


def test_the_retries_of_the_field_are_honoured(monkeypatch):
    variable = "NRL_VIRTUAL_CLUSTER_MAX_RETRIES"
    monkeypatch.delenv(variable, raising=False)
    assert options_of([1]).retries == 6
    monkeypatch.setenv(variable, "2")
    assert options_of([1]).retries == 2
    assert options_of([1], max_retries=4).retries == 4
    monkeypatch.setenv(variable, "many")
    with pytest.raises(ValueError, match="'many' is not a number"):
        options_of([1])


def test_constructor_and_plan_show_every_option():
    """In their order, with their defaults, the first six by position."""
    shown = list(inspect.signature(RayVirtualCluster).parameters.values())
    assert [one.name for one in shown[:6] if one.kind is one.POSITIONAL_OR_KEYWORD] == [
        *("bundle_ct_per_node_list", "use_gpus", "max_colocated_worker_groups"),
        *("num_gpus_per_node", "name", "placement_group_strategy"),
    ]
    assert len(shown) == 21 and all(one.kind is one.KEYWORD_ONLY for one in shown[6:])
    assert list(inspect.signature(RayVirtualCluster.plan).parameters.values()) == shown
    assert (shown[1].default, shown[-1].name, shown[-1].default) == (True, "node_order", None)
    documented = inspect.cleandoc(RayVirtualCluster.__doc__)  # compilers may dedent it
    assert [one.name for one in shown if f"\n    {one.name}: " not in documented] == []
    for use in (RayVirtualCluster, RayVirtualCluster.plan):
        with pytest.raises(TypeError, match="unexpected keyword argument 'gpus'"):
            use([1], gpus=2)


def test_tools_that_only_read_the_source_see_the_same():
    source = ast.parse(textwrap.dedent(inspect.getsource(RayVirtualCluster.__init__)))
    (constructor,) = source.body
    written = constructor.args
    _, *by_position = [one.arg for one in written.args]
    by_name = [one.arg for one in written.kwonlyargs]
    shown = inspect.signature(RayVirtualCluster).parameters.values()
    assert by_position + by_name == [one.name for one in shown]
    assert len(written.defaults) == 5 and None not in written.kw_defaults
    assert constructor.decorator_list == []


def test_each_option_and_each_default_stands_once():
    given = [one for one in fields(ClusterOptions) if one.init]
    assert [one.name for one in given] == list(inspect.signature(RayVirtualCluster).parameters)
    assert {one.default for one in given} == {one.default_factory for one in given} == {MISSING}
    options = options_of([1])
    with pytest.raises(FrozenInstanceError):
        options.unified = True


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"cpus": 0}, ValueError, "holds nothing"),
        ({"cpus": -1}, ValueError, "cpus=-1 is not a finite number of at least 0"),
        ({"cpus": float("nan")}, ValueError, "cpus=nan is not a finite number"),
        ({"cpus": "2"}, TypeError, "cpus is a number, not '2'"),
        ({"gpus": True}, TypeError, "gpus is a number, not True"),
        ({"gpus": 1.5}, ValueError, "1.5 devices are neither a part of one nor whole ones"),
        ({"gpus": 0.00001}, ValueError, "is less than Ray counts, which is 0.0001"),
        ({"memory": 1.5}, TypeError, "memory is a whole number of bytes"),
        ({"resources": ["disk"]}, TypeError, "resources is a mapping"),
        ({"resources": {"GPU": 1}}, ValueError, "GPU is said by gpus"),
        ({"resources": {"memory": 1}}, ValueError, "memory is said by memory"),
        ({"resources": {"object_store_memory": 1}}, ValueError, "a name that Ray keeps for itself"),
        ({"resources": {"node:10.0.0.1": 1}}, ValueError, "a name that Ray keeps for itself"),
        ({"resources": {"CPU_group_0_ab": 1}}, ValueError, "a name that Ray keeps for itself"),
        ({"resources": {"": 1}}, TypeError, "'' is not the name of a resource"),
        ({"resources": {"disk": -1}}, ValueError, r"resources\['disk'\]=-1 is not"),
    ],
)
def test_specs_of_bundles_are_refused_that_ray_would_refuse_later_or_never(fields, error, said):
    with pytest.raises(error, match=said):
        BundleSpec(**fields)


def test_a_spec_that_says_nothing_is_of_one_cpu():
    assert BundleSpec().amounts("GPU") == {"CPU": 1.0}


def test_specs_for_all_for_each_node_and_for_each_bundle():
    trainer, sandbox = BundleSpec(cpus=4, gpus=1), BundleSpec(cpus=0, memory=1 << 30, resources={"disk": 0.5})
    gpu, disk = {"CPU": 4.0, "NPU": 1.0}, {"memory": float(1 << 30), "disk": 0.5}
    for specs, wanted in (
        (trainer, ((gpu, gpu), (), (gpu,))),
        ([trainer, [], sandbox], ((gpu, gpu), (), (disk,))),
        ([[trainer, sandbox], trainer, [sandbox]], ((gpu, disk), (), (disk,))),
    ):
        assert options_of([2, 0, 1], accelerator="NPU", bundle_specs=specs).request.bundles == wanted


@pytest.mark.hostile
def test_an_order_that_can_t_be_pickled_does_not_keep_the_options_from_travelling():
    options = options_of([2], node_order=lambda node: node.address, bundle_specs=BundleSpec())
    copied = pickle.loads(pickle.dumps(options.of_a_copy()))
    assert (copied.node_order, copied.request.node_order) == (None, None)
    assert copied.request.bundles == options.request.bundles and options.request.node_order is not None


def test_the_least_that_ray_counts_is_enough_for_a_bundle():
    least = BundleSpec(cpus=0.0001, resources={"disk": 0.0001})
    assert least.amounts("GPU") == {"CPU": 0.0001, "disk": 0.0001}
    with pytest.raises(ValueError, match=r"less than Ray counts, which is 0\.0001"):
        BundleSpec(cpus=0.00009)
