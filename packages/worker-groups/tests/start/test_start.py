"""Failures during start-up: told in time with all attributes, and nothing is left, by Ray's own account."""

import importlib
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
import ray
from patience import eventually
from ray.util.state import list_actors
from workers import DiesInInit, RaisesInInit, RaisesOnAll, SleepsInInit, Worker

from raycrew.cluster_core import BundlesLostError, BundlesOccupiedError, RayVirtualCluster
from raycrew.cluster_core.testing import connected, simulated_nodes
from raycrew.worker_groups import (
    EnvironmentProviderError,
    RayWorkerBuilder,
    RayWorkerGroup,
    WorkerFailureError,
    WorkerFailuresError,
    WorkerStartTimeoutError,
)

HAS_DASHBOARD = find_spec("aiohttp") is not None

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def address():
    with simulated_nodes([{"num_cpus": 8, "include_dashboard": HAS_DASHBOARD}]) as ray_cluster:
        yield ray_cluster.address


@pytest.fixture
def cluster(address):
    with connected(address), RayVirtualCluster([3], use_gpus=False) as made:
        yield made


def living_actors():
    """By Ray's own account: each worker has a name, and the state API (with a dashboard) knows all.

    The watches of nodes stay for the next group.
    """
    names = (actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True))
    named = {name for name in names if not name.startswith("raycrew-watch-")}
    if not HAS_DASHBOARD:
        return named
    listed = list_actors(limit=1000, raise_on_missing_output=False)
    workers = [actor for actor in listed if actor.state != "DEAD" and actor.class_name != "Watch"]
    return named | {actor.name or actor.actor_id for actor in workers}


def assert_nothing_is_left(cluster):
    eventually(lambda: not living_actors(), "Ray's state API has heard that all actors ended")
    cluster.claim(None, "the next").release()


def test_a_worker_that_raises_ends_the_rest(cluster):
    with pytest.raises(WorkerFailureError) as caught:
        RayWorkerGroup(cluster, RayWorkerBuilder(RaisesInInit, 1), name_prefix="policy")
    error = caught.value
    assert (error.rank, error.bundle_index, error.group_name, error.method) == (1, 1, "policy", "__init__")
    assert error.node_id == ray.get_runtime_context().get_node_id()
    assert error.pid not in (None, os.getpid())
    assert error.pending == (0, 2)
    assert isinstance(error.cause, RuntimeError)
    assert str(error.cause) == "not today"
    assert "RuntimeError: not today" in error.traceback
    assert "the last words" in error.log_tail
    for part in ("rank 1 of 'policy'", f"pid {error.pid}", "not today", "the last words"):
        assert part in str(error)
    assert_nothing_is_left(cluster)
    with RayWorkerGroup(cluster, Worker) as group:
        eventually(lambda: len(living_actors()) == 3, "Ray's state API has heard of the new actors")
        assert len(group.call("pid").get_results()) == 3


def test_several_failures_are_one_group_of_exceptions(cluster, tmp_path):
    with pytest.raises(WorkerFailuresError, match="3 workers of 'RaisesOnAll' failed") as caught:
        RayWorkerGroup(cluster, RayWorkerBuilder(RaisesOnAll, str(tmp_path)))
    assert isinstance(caught.value, ExceptionGroup)
    assert [part.rank for part in caught.value.exceptions] == [0, 1, 2]
    assert_nothing_is_left(cluster)


def test_a_worker_that_dies_is_named(cluster):
    with pytest.raises(WorkerFailureError, match=r"rank 1 .* died during __init__") as caught:
        RayWorkerGroup(cluster, DiesInInit)
    assert (caught.value.rank, caught.value.pending) == (1, ())
    assert_nothing_is_left(cluster)


class Crooked(RayVirtualCluster):
    """A cluster whose last bundle can't take a worker."""

    def claim(self, indices, holder):
        return CrookedClaim(super().claim(indices, holder))


class CrookedClaim:
    def __init__(self, claim):
        self._claim = claim

    def __getattr__(self, name):
        return getattr(self._claim, name)

    def actor_options(self, position):
        options = self._claim.actor_options(position)
        if position == len(self._claim.bundles) - 1:
            options |= {"resources": {"unicorn": 1}, "scheduling_strategy": "DEFAULT"}
        return options


def test_a_worker_that_cannot_be_placed_is_named(address):
    with connected(address), Crooked([1], use_gpus=False) as crooked:
        with pytest.raises(WorkerStartTimeoutError, match="was not placed") as caught:
            RayWorkerGroup(crooked, Worker, init_timeout_s=2)
        assert "Worker-0-0" in str(caught.value)
        assert (caught.value.rank, caught.value.bundle_index, caught.value.pid) == (None, 0, None)
        assert_nothing_is_left(crooked)


@pytest.mark.long  # in short: above, and for one that sleeps test_testing
def test_a_worker_that_sleeps_past_the_deadline_or_cannot_be_placed_is_named(cluster):
    with Crooked([3], use_gpus=False) as crooked, ThreadPoolExecutor(2) as threads:
        sleeping = threads.submit(RayWorkerGroup, cluster, SleepsInInit, init_timeout_s=25)
        unplaced = threads.submit(RayWorkerGroup, crooked, Worker, init_timeout_s=25)
        slept, waited = sleeping.exception(), unplaced.exception()
        for error in (slept, waited):
            assert isinstance(error, WorkerStartTimeoutError), error
            assert isinstance(error, TimeoutError)
        assert "its __init__ did not return within the 25 s" in str(slept)
        assert (slept.rank, slept.bundle_index, slept.pid is None) == (1, 1, False)
        assert "Worker-0-2" in str(waited)
        assert "was not placed" in str(waited)
        assert (waited.rank, waited.bundle_index, waited.pid) == (None, 2, None)
        assert_nothing_is_left(crooked)
    assert_nothing_is_left(cluster)


def test_bundles_that_are_held_are_refused(cluster):
    with RayWorkerGroup(cluster, Worker, name_prefix="first"):
        with pytest.raises(BundlesOccupiedError, match="first"):
            RayWorkerGroup(cluster, Worker)
        eventually(lambda: len(living_actors()) == 3, "the first group's actors live, and no others")


class Vanishing(RayVirtualCluster):
    """A cluster whose placement groups somebody removes as soon as they are claimed."""

    def claim(self, indices, holder):
        claim = super().claim(indices, holder)
        for group in self.get_placement_groups():
            ray.util.remove_placement_group(group)
        return claim


LOST = r"removed by somebody else.*\[0, 1, 2\]"


@pytest.mark.hostile
def test_bundles_that_somebody_removes_before_workers_are_placed_end_the_start(address):
    with (
        connected(address),
        Vanishing([3], use_gpus=False) as cluster,
        pytest.raises(BundlesLostError, match=LOST),
    ):
        RayWorkerGroup(cluster, Worker, init_timeout_s=200)


@pytest.mark.hostile
def test_bundles_that_somebody_removes_under_starting_workers_end_the_start(cluster):
    with ThreadPoolExecutor(1) as threads:
        start = threads.submit(RayWorkerGroup, cluster, SleepsInInit, init_timeout_s=200)
        eventually(lambda: len(living_actors()) == 3, "the workers are being started")
        ray.util.remove_placement_group(cluster.get_placement_groups()[0])
        with pytest.raises(BundlesLostError, match=LOST):
            start.result(250)


class Provider:
    """Gives this interpreter to everyone, and notes what it was asked."""

    def __init__(self, python=sys.executable):
        self.python = python
        self.asked = []

    def python_for(self, actor_class_fqn, runner):
        self.asked.append((actor_class_fqn, [node for node, _ in runner.run_on_each_node(os.getpid)]))
        if self.python is None:
            raise FileNotFoundError("no such environment")
        return self.python


@pytest.mark.long  # in short: test_declared_on_ray, and integration-tests/test_environments
def test_a_class_that_only_its_environment_has_is_described_there(cluster, tmp_path):
    (tmp_path / "faraway.py").write_text(
        "import os, sys\n"
        "class Far:\n"
        "    _default_options = {'runtime_env': {'env_vars': {'OF_THE_CLASS': 'yes'}}}\n"
        "    @staticmethod\n"
        "    def configure_worker(num_gpus, bundle_indices):\n"
        "        runtime_env = {'env_vars': {'FROM_START': 'yes'}}\n"
        "        return {}, {'FAR': 'yes'}, {'where': sys.executable}, runtime_env\n"
        "    def __init__(self, where): self.where = where\n"
        "    def answer(self, *, again): return self.where, again\n"
        "    def environment(self):\n"
        "        return [os.environ.get(name) for name in ('FAR', 'FROM_START', 'OF_THE_CLASS')]\n"
        "    def items(self, n): yield from range(n)\n"
    )
    provider = Provider()
    variables = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    with RayWorkerGroup(cluster, "faraway.Far", environments=provider, env_vars=variables) as group:
        assert "faraway" not in sys.modules
        assert group.call("answer", again=1).get_results() == [(sys.executable, 1)] * 3
        assert group.call("environment").get_results() == [["yes"] * 3] * 3
        assert group.call("items", 2).get_results() == [[0, 1]] * 3
        with pytest.raises(TypeError, match=r"missing a required .*argument: 'again'"):
            group.call("answer")
    assert provider.asked == [("faraway.Far", [ray.get_runtime_context().get_node_id()])]


def test_a_class_that_nobody_or_only_the_driver_has_is_reported(cluster, tmp_path, monkeypatch):
    with pytest.raises(WorkerFailureError, match=r"no module for 'no_such_module\.Far'"):
        RayWorkerGroup(cluster, "no_such_module.Far")
    (tmp_path / "only_here.py").write_text("class Near: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WorkerFailureError, match=r"No module named 'only_here'.*on PYTHONPATH there"):
        RayWorkerGroup(cluster, importlib.import_module("only_here").Near, 1)
    assert_nothing_is_left(cluster)


def test_an_environment_that_cannot_be_had_is_reported(cluster):
    with pytest.raises(EnvironmentProviderError, match=r"no environment for workers of workers\.Worker"):
        RayWorkerGroup(cluster, Worker, environments=Provider(None))
    with pytest.raises(TypeError, match="no EnvironmentProvider"):
        RayWorkerGroup(cluster, Worker, environments=42)
    assert_nothing_is_left(cluster)


def test_what_configure_worker_changes_is_noted(cluster, caplog):
    from workers import Configured

    with caplog.at_level(logging.INFO, "raycrew"):
        RayWorkerGroup(cluster, Configured, 1, env_vars={"COLOUR": "red"}).shutdown()
    assert "Configured.configure_worker overrides the caller's COLOUR" in caplog.text
