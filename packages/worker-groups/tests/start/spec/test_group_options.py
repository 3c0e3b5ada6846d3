"""The options of a group stand in one value, and are checked before anything is started."""

import asyncio
import inspect
from dataclasses import FrozenInstanceError, fields
from typing import Self

import pytest
from workers import Worker

from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import RayWorkerBuilder, RayWorkerGroup
from raycrew.worker_groups._start.spec.options import GroupOptions
from raycrew.worker_groups._worker import CommunicationOptions
from raycrew.worker_groups.testing import InProcessGroup


def keyword_options(of):
    parameters = inspect.signature(of).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_the_constructors_signature_is_complete():
    names = {field.name for field in fields(GroupOptions)}
    assert keyword_options(RayWorkerGroup).keys() == keyword_options(InProcessGroup).keys() == names
    assert inspect.Parameter.empty not in keyword_options(RayWorkerGroup).values()
    for name in names:
        assert f"    {name}:" in RayWorkerGroup.__doc__


@pytest.mark.parametrize("group_class", [RayWorkerGroup, InProcessGroup])
def test_a_start_that_is_awaited_has_the_parameters_of_the_class(group_class):
    start = inspect.signature(group_class.start)
    assert start.parameters == inspect.signature(group_class).parameters
    assert start.return_annotation is Self
    assert (
        inspect.iscoroutinefunction(group_class.start)
        and "see the class" in group_class.start.__doc__.lower()
    )
    with pytest.raises(TypeError, match="missing 2 required positional arguments: 'cluster' and 'worker'"):
        asyncio.run(group_class.start())


def test_defaults_are_good_and_fixed():
    options = GroupOptions(**keyword_options(RayWorkerGroup))
    assert (options.variables, options.communication.asynchronous) == ({}, False)
    with pytest.raises(FrozenInstanceError):
        options.progress = True


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"env_vars": {"A=B": "1"}}, ValueError, "A=B"),
        ({"env_vars": "A"}, TypeError, "mapping"),
        ({"secrets": "TOKEN"}, TypeError, r"\['TOKEN'\]"),
        ({"secrets": [1]}, TypeError, "has one of type int"),
        ({"idempotent_methods": "step"}, TypeError, r"\['step'\]"),
        ({"max_restarts": -1}, ValueError, "max_restarts"),
        ({"max_restarts": 1}, ValueError, "max_restarts= is for groups with restart_on_failure=True"),
        ({"on_worker_failure": 3}, TypeError, "on_worker_failure"),
        ({"min_workers": 0, "restart_on_failure": True}, ValueError, "min_workers"),
        ({"standby": -1}, ValueError, "standby is -1; it has to be at least 0"),
        ({"standby": True}, TypeError, "standby is a whole number"),
        ({"spare_bundles": 0.5}, TypeError, "spare_bundles is a whole number"),
        ({"standby": 1}, ValueError, r"all 1 bundle\(s\) of the cluster are to be spare"),
        ({"preload": ["torch"]}, ValueError, "preload= is for workers that stand by, and standby is 0"),
        ({"preload": "torch", "standby": 1}, TypeError, r"preload is .* as in \['torch'\]"),
        ({"preload": ["os.path", "no module"], "standby": 1}, ValueError, "which 'no module' is not"),
        ({"preload": ["a..b"], "standby": 1}, ValueError, r"which 'a\.\.b' is not"),
        ({"preload": ["a.class"], "standby": 1}, ValueError, r"which 'a\.class' is not"),
        ({"min_workers": 1.0, "restart_on_failure": True}, TypeError, "min_workers is a whole number"),
        ({"min_workers": 1}, ValueError, "min_workers= is for groups with restart_on_failure=True"),
        ({"min_workers": 2, "restart_on_failure": True}, ValueError, "min_workers is 2, of 1 workers"),
        ({"memory_limit": 1.5}, TypeError, "memory_limit"),
        ({"memory_limit": True}, TypeError, "memory_limit"),
        ({"memory_limit": "8 gigs"}, ValueError, "memory_limit"),
        ({"memory_limit": "-1GB"}, ValueError, "memory_limit"),
        ({"memory_limit": 0}, ValueError, "memory_limit"),
        ({"diagnose": ""}, TypeError, "diagnose is a folder, True or False, not ''"),
        ({"diagnose": 3}, TypeError, "diagnose is a folder, True or False, not 3"),
        ({"launchers": {"*": 3}}, TypeError, r"launchers\['\*'\] is a command"),
        ({"init_timeout_s": 0}, ValueError, "init_timeout_s"),
        ({"init_timeout_s": float("nan")}, ValueError, "init_timeout_s"),
        ({"init_timeout_s": "5"}, TypeError, "init_timeout_s"),
        ({"ports_per_worker": -1}, ValueError, "ports_per_worker"),
        ({"ports_per_worker": 1.5}, TypeError, "ports_per_worker"),
        ({"port_range": (9000, 8000)}, ValueError, "port_range"),
        ({"port_range": (1, 70000)}, ValueError, "port_range"),
        ({"port_range": 8000}, TypeError, "port_range"),
        ({"port_range": (0, 8000)}, ValueError, "port_range"),
        ({"port_range": (1023, 8000)}, ValueError, "port_range is 1023; it has to be at least 1024"),
        ({"port_range": (8000.5, 9000)}, TypeError, "port_range"),
        ({"port_range": (8000, 8500, 9000)}, TypeError, "port_range"),
        ({"max_restarts": 1.5}, TypeError, "max_restarts is a whole number"),
        ({"max_restarts": True}, TypeError, "max_restarts"),
        ({"init": {1: 2}}, TypeError, "init is a mapping by name, .*not of type dict with keys of type int"),
        ({"launchers": {"*": []}}, TypeError, r"launchers\['\*'\]"),
        ({"launchers": {"*": ["nice", ""]}}, TypeError, r"launchers\['\*'\]"),
        ({"launchers": "nice"}, TypeError, "launchers are commands"),
        ({"launchers": {"*": "   "}}, TypeError, r"launchers\['\*'\] is a command"),
        (
            {"launchers": {"*": "nsys -o 'a b"}},
            ValueError,
            r"launchers\['\*'\] is no command.*No closing quotation",
        ),
        ({"launchers": {"*": ["nice", "a\0b"]}}, ValueError, r"launchers\['\*'\] has a null character"),
        (
            {"launchers": {0: "nice"}},
            TypeError,
            "launchers are commands by pattern of workers' names, which 0",
        ),
        ({"load_balancing_strategy": "by_luck"}, ValueError, "by_luck"),
    ],
)
@pytest.mark.parametrize("group_class", [RayWorkerGroup, InProcessGroup])
def test_bad_options_are_refused_before_anything_is_started(group_class, options, error, said):
    cluster = FakeCluster([1])
    with pytest.raises(error, match=said):
        group_class(cluster, Worker, **options)
    assert cluster.holders() == {}


def test_the_bounds_themselves_are_allowed():
    bounds = {
        "port_range": (1024, 65535),
        "ports_per_worker": 0,
        "max_restarts": 0,
        "init_timeout_s": 1e-9,
        "memory_limit": 1,
        "launchers": {"*": "nice", "a": ["nice", "-n", "19"]},
    }
    options = GroupOptions(**keyword_options(RayWorkerGroup) | bounds)
    assert options.memory_limit_bytes == 1
    assert GroupOptions(**keyword_options(RayWorkerGroup) | {"port_range": (8000, 8000)}).port_range
    assert (
        GroupOptions(**keyword_options(RayWorkerGroup) | {"memory_limit": "2KiB"}).memory_limit_bytes == 2048
    )
    assert GroupOptions(**keyword_options(RayWorkerGroup)).memory_limit_bytes == 0
    supervised = keyword_options(RayWorkerGroup) | {"restart_on_failure": True}
    known = [
        GroupOptions(**supervised | own).n_restarts for own in ({}, {"max_restarts": 0}, {"max_restarts": 7})
    ]
    assert known == [3, 0, 7]
    reserve = {"standby": 1, "spare_bundles": 3, "preload": ["os.path"]}
    assert GroupOptions(**keyword_options(RayWorkerGroup) | reserve).n_spare == 4


def test_variables_of_a_function_are_not_known_before_the_ranks():
    options = keyword_options(RayWorkerGroup)
    assert GroupOptions(**options | {"env_vars": {"A": "1"}}).variables == {"A": "1"}
    assert GroupOptions(**options | {"env_vars": lambda rank: {"A": "1"}}).variables == {}
    told = {"enable_gradient_compression": True, "async_communication": False}
    assert GroupOptions(**options | told).communication == CommunicationOptions(True, False)


@pytest.mark.parametrize(
    "option",
    [{"name": "x"}, {"max_restarts": 3}, {"lifetime": "detached"}, {"scheduling_strategy": "SPREAD"}],
)
def test_what_is_for_a_group_to_say_is_no_option_of_its_worker(option):
    builder = RayWorkerBuilder(Worker).options(max_concurrency=2, name=None)
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=f"^{name}={value!r} would have no effect: where workers are"):
        builder.options(num_cpus=1, **option)
    assert builder.ray_options["max_concurrency"] == 2
