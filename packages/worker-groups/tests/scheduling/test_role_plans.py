"""From strategies to groups and bundles, and from workers to bundles of a cluster."""

from contextlib import nullcontext
from itertools import permutations
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycrew.cluster_core import BundleSpec
from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups.scheduling import (
    Job,
    SchedulingSpec,
    SchedulingStrategy,
    WorkerConfigurationError,
    WorkerCreationError,
)
from raycrew.worker_groups.scheduling._creation import variables_of
from raycrew.worker_groups.scheduling._plan import (
    check_colocated,
    check_separable,
    choose_bundles,
    plan_groups,
    the_one_accelerator,
)

SMALL, LARGE = SchedulingSpec(cpu=1, gpu=1), SchedulingSpec(cpu=2, gpu=2, mem=1, port_count=5)


def planned(strategy, *specs):
    plans = plan_groups(Job("actor", len(specs), specs, SchedulingStrategy(strategy)))
    return [(plan.name, len(plan.specs), [bundle.gpus for bundle in plan.bundles]) for plan in plans]


def test_each_strategy_has_its_groups_and_bundles():
    assert planned("shared", SMALL, LARGE) == [("actor", 2, [1, 2])]
    assert planned("separation", SMALL, LARGE) == [("actor", 2, [1, 2])]
    assert planned("separate", SMALL, LARGE) == [("actor/0", 1, [1]), ("actor/1", 1, [2])]
    assert planned("deferred", SMALL, LARGE) == [("actor/0", 1, [1]), ("actor/1", 1, [1, 1])]


def test_a_bundle_has_what_its_worker_is_given_and_a_deferred_one_its_part():
    (plan,) = plan_groups(Job("actor", 1, [LARGE]))
    assert plan.bundles == (BundleSpec(cpus=2, gpus=2, memory=1 << 30),)
    assert (plan.port_count, plan.is_deferred) == (5, False)
    (plan,) = plan_groups(Job("actor", 1, [LARGE], SchedulingStrategy("deferred")))
    assert plan.bundles == (BundleSpec(cpus=1, gpus=1, memory=1 << 29),) * 2
    assert plan.is_deferred


def test_deferred_workers_without_accelerators_have_a_bundle_for_each_cpu():
    assert planned("deferred", SchedulingSpec(cpu=3)) == [("actor/0", 1, [0, 0, 0])]
    for part in (SchedulingSpec(cpu=1, gpu=0.5), SchedulingSpec(cpu=0.5), SchedulingSpec(cpu=0, mem=1)):
        with pytest.raises(ValueError, match="whole"):
            planned("deferred", part)


def test_one_group_has_one_command():
    commands = [SchedulingSpec(cmd=["nice"]), SchedulingSpec()]
    with pytest.raises(WorkerConfigurationError, match="'separate'"):
        planned("shared", *commands)
    assert len(planned("separate", *commands)) == 2


def test_workers_of_one_group_have_one_environment():
    specs = [SchedulingSpec(environment="my.Engine"), SchedulingSpec()]
    for strategy in (SchedulingStrategy(), SchedulingStrategy("colocation", "ref", fork=True)):
        job = Job("actor", 2, specs, strategy)
        with pytest.raises(WorkerConfigurationError, match="differ in environment"):
            plan_groups(job) if strategy.type == "shared" else check_colocated(job, Job("ref", 2))


def bundles(*specs):
    return FakeCluster([len(specs)], bundle_specs=[list(specs)]).bundles


def test_workers_get_the_bundles_that_fit_them_best():
    here = bundles(BundleSpec(cpus=4), BundleSpec(cpus=1), BundleSpec(cpus=2), BundleSpec(cpus=1))
    wanted = [BundleSpec(cpus=1), BundleSpec(cpus=2), BundleSpec(cpus=3)]
    assert choose_bundles(here, (), wanted) == [1, 2, 0]
    assert choose_bundles(here, {1}, wanted) == [3, 2, 0]


def test_accelerators_are_not_spent_on_who_needs_none():
    here = bundles(BundleSpec(cpus=1, gpus=1), BundleSpec(cpus=8))
    assert choose_bundles(here, (), [BundleSpec(cpus=1)]) == [1]
    assert choose_bundles(here, (), [BundleSpec(cpus=1), BundleSpec(cpus=1, gpus=1)]) == [1, 0]


def test_accelerators_are_spared_before_any_number_of_other_things_and_cpus_before_memory():
    others = BundleSpec(cpus=1, resources={"disk": 0.1, "net": 0.1})
    here = bundles(BundleSpec(cpus=1, gpus=1), others)
    assert choose_bundles(here, (), [BundleSpec(cpus=1)]) == [1]
    here = bundles(BundleSpec(cpus=0.5, memory=1 << 30), BundleSpec(cpus=0, memory=2 << 30))
    assert choose_bundles(here, (), [BundleSpec(cpus=0, memory=1 << 30)]) == [1]


def test_workers_move_where_one_would_be_left_without():
    gib = 1 << 30
    here = bundles(BundleSpec(cpus=4, memory=gib), BundleSpec(cpus=2, memory=8 * gib))
    much, many = BundleSpec(cpus=1, memory=8 * gib), BundleSpec(cpus=2, memory=gib)
    assert choose_bundles(here, (), [many, much]) == [0, 1]
    assert choose_bundles(here, (), [much, many]) == [1, 0]
    with pytest.raises(WorkerCreationError, match=r"no free bundle has .*free are \[\{'CPU': 4"):
        choose_bundles(here, (), [much, much])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=5), st.data())
def test_whatever_fits_is_found(sizes, data):
    amounts = st.integers(0, 3), st.integers(1, 3)
    wanted = data.draw(st.lists(st.tuples(*amounts), min_size=1, max_size=len(sizes)))
    here = bundles(*(BundleSpec(cpus=c, memory=m) for c, m in sizes))
    specs = [BundleSpec(cpus=c, memory=m) for c, m in wanted]

    def fits(chosen):
        return all(sizes[i][0] >= c and sizes[i][1] >= m for i, (c, m) in zip(chosen, wanted, strict=True))

    if any(map(fits, permutations(range(len(sizes)), len(wanted)))):
        chosen = choose_bundles(here, (), specs)
        assert len(set(chosen)) == len(chosen) and fits(chosen)
    else:
        with pytest.raises(WorkerCreationError):
            choose_bundles(here, (), specs)


def test_a_worker_gets_a_part_of_a_bundle_that_groups_share():
    here = bundles(BundleSpec(cpus=2), BundleSpec(cpus=4))
    assert choose_bundles(here, (), [BundleSpec(cpus=2)], slots=2) == [1]


def test_too_few_or_too_small_bundles_are_named():
    here = bundles(BundleSpec(cpus=1), BundleSpec(cpus=1))
    with pytest.raises(WorkerCreationError, match=r"'CPU': 2.0.*1 of 2 bundles are taken"):
        choose_bundles(here, {0}, [BundleSpec(cpus=2)])
    with pytest.raises(WorkerCreationError):
        choose_bundles(here, (), [BundleSpec(cpus=1)] * 3)


def colocated(*specs, fork=False):
    return Job("ref", len(specs), specs, SchedulingStrategy("colocation", "actor", fork=fork))


def test_a_colocated_role_has_no_more_than_its_target():
    target = Job("actor", 2, [SMALL])
    check_colocated(colocated(SMALL), target)
    check_colocated(colocated(SMALL, SMALL, fork=True), target)
    with pytest.raises(WorkerConfigurationError, match="3 workers, and that one 2"):
        check_colocated(colocated(SMALL, SMALL, SMALL), target)
    with pytest.raises(WorkerConfigurationError, match="worker 1 wants 2 accelerators, not 1"):
        check_colocated(colocated(SMALL, LARGE, fork=True), target)


def test_a_role_is_colocated_with_one_that_is_colocated():
    target = Job("actor", 1, [SMALL], SchedulingStrategy("colocation", "critic"))
    check_colocated(colocated(SMALL), target)


@pytest.mark.parametrize("own", [{"env_vars": {"A": "1"}}, {"cmd": ["nice"]}, {"environment": "my.Engine"}])
def test_only_processes_of_their_own_can_have_variables_of_their_own(own):
    target, spec = Job("actor", 1, [SMALL]), SchedulingSpec(**own)
    check_colocated(colocated(spec, fork=True), target)
    with pytest.raises(WorkerConfigurationError, match="fork=True"):
        check_colocated(colocated(spec), target)


def test_each_worker_has_its_variables_and_a_fork_the_mask_of_its_target():
    specs = [SchedulingSpec(env_vars={"A": "1"}), SchedulingSpec(env_vars={"A": "2"})]
    given = variables_of(specs, [{"MASK": "0"}, {"MASK": "1"}])
    each = [given(SimpleNamespace(rank=rank)) for rank in (1, 0)]
    assert each == [{"A": "2", "MASK": "1"}, {"A": "1", "MASK": "0"}]
    assert variables_of(specs[:1] * 2) == {"A": "1"}


def test_the_kind_of_accelerator_is_found_if_there_is_one():
    assert the_one_accelerator(["NPU", "NPU"]) == "NPU"
    assert the_one_accelerator([]) == "GPU"
    with pytest.raises(WorkerConfigurationError, match="GPU, NPU"):
        the_one_accelerator(["NPU", "GPU"])


@pytest.mark.parametrize("fork", [False, True])
def test_nobody_has_the_accelerators_that_a_deferred_role_leaves_to_its_engines(fork):
    target = Job("actor", 1, [SMALL], SchedulingStrategy("deferred"))
    with pytest.raises(WorkerConfigurationError, match="for what its engines start"):
        check_colocated(colocated(SMALL, fork=fork), target)
    check_colocated(colocated(SchedulingSpec(), fork=fork), target)


@pytest.mark.parametrize(
    ("own", "theirs", "fits"),
    [(0.5, 0.5, False), (0.5, 1, True), (0.5, 0, True), (0, 0, True), (1, 0.5, True), (1, 1, True)],
)
def test_two_roles_that_want_parts_of_accelerators_can_not_be_kept_apart(own, theirs, fits):
    job, target = (
        Job(role, 2, [SchedulingSpec(gpu=0), SchedulingSpec(gpu=gpu)])
        for role, gpu in (("actor", own), ("critic", theirs))
    )
    with nullcontext() if fits else pytest.raises(WorkerConfigurationError, match="'actor' can't be kept"):
        check_separable(job, target)
