"""Schedulers whose workers are threads of this process: roles, engines, errors and ends, without Ray."""

import asyncio
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import ClassVar

import pytest
from patience import PATIENCE_S, eventually
from ray.exceptions import ActorDiedError, ActorUnavailableError

from raycrew.cluster_core import BundleSpec
from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import WorkerStatus
from raycrew.worker_groups._group.life.waiting_for import is_done
from raycrew.worker_groups.errors import ResultTimeoutError, WorkerFailureError
from raycrew.worker_groups.scheduling import (
    EngineCallError,
    EngineCreationError,
    EngineImportError,
    Job,
    RayScheduler,
    SchedulerClosedError,
    SchedulerError,
    SchedulingSpec,
    SchedulingStrategy,
    WorkerConfigurationError,
    WorkerCreationError,
    WorkerFailedError,
    WorkerNotFoundError,
    WorkerTimeoutError,
    _creation,
    _ending,
    _server,
)
from raycrew.worker_groups.scheduling._creation import environment_of
from raycrew.worker_groups.scheduling._plan import plan_groups
from raycrew.worker_groups.testing import InProcessGroup

ECHO, CLOSING = "engines.Echo", "engines.Closing"
STRATEGIES = ["shared", "separate", "deferred", "separation"]


@pytest.fixture
def cluster():
    return FakeCluster([4])


@pytest.fixture
def scheduler(cluster):
    with RayScheduler(cluster, group_class=InProcessGroup, call_timeout_s=PATIENCE_S) as made:
        yield made


def job(role="actor", replicas=2, strategy="shared", target="", *, fork=False, specs=None):
    strategy = SchedulingStrategy(strategy, target, fork=fork)
    return Job(role, replicas, specs or [SchedulingSpec()], strategy)


def with_echo(scheduler, ids):
    for worker_id in ids:
        scheduler.create_engine(worker_id, ECHO, None, worker_id)
    return ids


def where(scheduler, ids):
    """Group and rank of each worker."""
    return [scheduler.call_engine(worker_id, "where")[:2] for worker_id in ids]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_role_of_each_strategy_can_be_called_and_ends(scheduler, cluster, strategy):
    ids = with_echo(scheduler, scheduler.create_workers(job(strategy=strategy)))
    assert ids == ["actor/0", "actor/1"]
    assert [scheduler.call_engine(one, "say", None, 1, x=2) for one in ids] == [
        (one, (1,), {"x": 2}) for one in ids
    ]
    group = {"separate": "own", "deferred": "own"}.get(strategy, "one")
    groups = {"own": [("actor/0", 0), ("actor/1", 0)], "one": [("actor", 0), ("actor", 1)]}
    assert where(scheduler, ids) == groups[group]
    assert len(cluster.holders()) == 2
    assert scheduler.delete_workers("actor") is True
    assert cluster.holders() == {}
    with pytest.raises(WorkerNotFoundError, match="there are"):
        scheduler.call_engine(ids[0], "say")


def test_workers_have_addresses_and_named_ports_of_their_own(scheduler):
    specs = [SchedulingSpec(port_count=2, port_names=["http"]), SchedulingSpec(port_count=3)]
    ids = scheduler.create_workers(job(specs=specs))
    one, two = scheduler.get_workers("actor", timeout=PATIENCE_S)
    assert ([one.id, two.id], one.ip) == (ids, "127.0.0.1")
    assert [len(one.worker_ports), len(two.worker_ports)] == [2, 3]
    assert not set(one.worker_ports) & set(two.worker_ports)
    assert one.named_ports == {"http": one.worker_ports[0]}
    more = scheduler.alloc_ports(ids[1], 2)
    assert [worker.engine_ports for worker in scheduler.get_workers("actor")] == [(), more]


def test_roles_do_not_share_bundles_unless_they_are_to(scheduler, cluster):
    scheduler.create_workers(job("actor", 3))
    with pytest.raises(WorkerCreationError, match="3 of 4 bundles are taken"):
        scheduler.create_workers(job("rollout", 2, "separation", "actor"))
    assert len(cluster.holders()) == 3, "nothing is left of what could not be created"
    scheduler.create_workers(job("rollout", 1, "separation", "actor"))
    assert len(cluster.holders()) == 4


def test_roles_take_nothing_that_somebody_else_holds(scheduler, cluster):
    claim = cluster.claim([0, 2], "somebody")
    scheduler.create_workers(job())
    assert cluster.holders() == {0: ("somebody",), 1: ("actor",), 2: ("somebody",), 3: ("actor",)}
    with pytest.raises(WorkerCreationError, match="4 of 4 bundles are taken"):
        scheduler.create_workers(job("critic", 1))
    claim.release()
    scheduler.create_workers(job("critic"))


def test_roles_that_share_accelerators_can_not_be_apart():
    half = [SchedulingSpec(gpu=0.5)]
    with RayScheduler(FakeCluster([4], use_gpus=True), group_class=InProcessGroup) as scheduler:
        scheduler.create_workers(job("actor", 1, specs=half))
        with pytest.raises(WorkerConfigurationError, match="can't be kept apart"):
            scheduler.create_workers(job("critic", 1, "separation", "actor", specs=half))
        scheduler.create_workers(job("critic", 1, "separation", "actor", specs=[SchedulingSpec(gpu=1)]))


@pytest.mark.parametrize("is_ending", [False, True])
def test_a_part_that_does_not_end_keeps_no_other_one(cluster, monkeypatch, is_ending):
    class Stuck(InProcessGroup):
        def shutdown(self, *args, **kwargs):
            is_clean = super().shutdown(*args, **kwargs)
            if self.name == "actor/1":
                raise OSError("no way out")
            return is_clean

    def refused(function, items):
        raise RuntimeError("cannot schedule new futures after shutdown")

    scheduler = RayScheduler(cluster, group_class=Stuck)
    scheduler.create_workers(job("actor", 3, "separate"))
    if is_ending:
        monkeypatch.setattr(_ending, "in_threads", refused)
    assert scheduler.close() is False
    assert cluster.holders() == {}


def test_unlike_workers_get_bundles_that_fit(request):
    specs = [BundleSpec(cpus=1), BundleSpec(cpus=4), BundleSpec(cpus=2)]
    cluster = FakeCluster([3], bundle_specs=[specs])
    with RayScheduler(cluster, group_class=InProcessGroup) as scheduler:
        ids = scheduler.create_workers(job(specs=[SchedulingSpec(cpu=3), SchedulingSpec(cpu=1)]))
        bundles = [seat.group.ranks[seat.rank].bundle_index for _, seat in map(scheduler._roles.seat, ids)]
    assert bundles == [1, 0]


def test_of_several_kinds_of_accelerators_workers_get_the_one_that_is_named():
    cluster = FakeCluster([2], bundle_specs=BundleSpec(cpus=1, gpus=1, resources={"NPU": 1}))
    with RayScheduler(cluster, group_class=InProcessGroup) as scheduler:
        scheduler.create_workers(job("actor", 1))
        with pytest.raises(WorkerConfigurationError, match="say which as accelerator="):
            scheduler.create_workers(job("ref", 1, specs=[SchedulingSpec(gpu=1)]))
    with RayScheduler(cluster, accelerator="NPU", group_class=InProcessGroup) as scheduler:
        scheduler.create_workers(job("actor", 1, specs=[SchedulingSpec(gpu=1)]))


def test_a_second_name_has_engines_of_its_own_in_the_same_workers(scheduler):
    actors = with_echo(scheduler, scheduler.create_workers(job()))
    refs = with_echo(scheduler, scheduler.create_workers(job("ref", 1, "colocation", "actor")))
    assert where(scheduler, refs) == where(scheduler, actors[:1])
    assert scheduler.call_engine("ref/0", "say")[0] == "ref/0"
    (worker,) = scheduler.get_workers("ref")
    assert worker.worker_ports == scheduler.get_workers("actor")[0].worker_ports
    assert scheduler.delete_workers("ref")
    assert scheduler.call_engine("actor/0", "say", "actor/0")[0] == "actor/0"
    with pytest.raises(EngineCallError, match="no engine 'ref/0'"):
        scheduler.call_engine("actor/0", "say", "ref/0")


def test_a_second_name_that_could_not_make_an_engine_does_not_end_the_one_that_is_there(scheduler):
    with_echo(scheduler, scheduler.create_workers(job("actor", 1)))
    scheduler.create_workers(job("ref", 1, "colocation", "actor"))
    with pytest.raises(EngineCreationError, match="already"):
        scheduler.create_engine("ref/0", ECHO, "actor/0")
    scheduler.delete_workers("ref")
    assert scheduler.call_engine("actor/0", "say")[0] == "actor/0"


def test_the_ports_of_a_second_name_go_with_it_and_not_its_targets(cluster):
    six = (7210, 7215)  # who names no range is given other ports
    with RayScheduler(cluster, group_class=InProcessGroup, port_range=six) as scheduler:
        scheduler.create_workers(job(replicas=1))
        own = {*scheduler.get_workers("actor")[0].worker_ports, *scheduler.alloc_ports("actor/0", 1)}
        for _ in range(3):
            scheduler.create_workers(job("ref", 1, "colocation", "actor"))
            ports = scheduler.alloc_ports("ref/0", 3)
            assert len(ports) == 3 and not own & set(ports)
            assert scheduler.delete_workers("ref")


def test_a_second_name_ends_only_engines_of_its_own(scheduler):
    scheduler.create_workers(job())
    scheduler.create_workers(job("ref", 1, "colocation", "actor"))
    for one in ("ref/0", "actor/1"):
        scheduler.create_engine(one, ECHO, "model", one)
    scheduler.create_engine("ref/0", ECHO, "other")
    scheduler.destroy_engine("actor/0", "other")
    scheduler.create_engine("actor/0", ECHO, "other", "anew")
    assert scheduler.delete_workers("ref")
    assert scheduler.call_engine("actor/1", "say", "model")[0] == "actor/1"
    assert scheduler.call_engine("actor/0", "say", "other")[0] == "anew"
    with pytest.raises(EngineCallError, match="no engine 'model'"):
        scheduler.call_engine("actor/0", "say", "model")


@pytest.mark.parametrize("strategy", ["shared", "separate"])
def test_forked_workers_are_others_beside_their_targets(scheduler, cluster, strategy):
    actors = with_echo(scheduler, scheduler.create_workers(job(strategy=strategy)))
    forks = with_echo(scheduler, scheduler.fork_workers("ref", "actor"))
    assert forks == ["ref/0", "ref/1"]
    assert {group.split("/")[0] for group, _ in where(scheduler, forks)} == {"ref"}
    ports = [set(worker.worker_ports) for role in ("actor", "ref") for worker in scheduler.get_workers(role)]
    assert len(set.union(*ports)) == sum(map(len, ports))
    assert len(cluster.holders()) == 2
    with pytest.raises(WorkerConfigurationError, match=r"\['ref'\]; delete those first"):
        scheduler.delete_workers("actor")
    assert scheduler.call_engine(actors[0], "say")[0] == "actor/0"
    assert scheduler.delete_workers()
    assert cluster.holders() == {}


def test_names_and_forks_can_be_of_forks(scheduler):
    scheduler.create_workers(job())
    scheduler.fork_workers("ref", "actor")
    scheduler.create_workers(job("critic", 2, "colocation", "ref"))
    scheduler.fork_workers("reward", "critic")
    ids = [one.id for role in ("critic", "reward") for one in scheduler.get_workers(role)]
    assert [group for group, _ in where(scheduler, with_echo(scheduler, ids))] == ["ref"] * 2 + ["reward"] * 2


def test_what_is_not_there_is_not_found(scheduler):
    scheduler.create_workers(job())
    for worker_id in ("actor/2", "actor/00", "actor/\u0660", "actor/x", "actor/-1", "actor", "other/0", ""):
        with pytest.raises(WorkerNotFoundError):
            scheduler.ping(worker_id)
    for ask in (scheduler.get_workers, scheduler.delete_workers):
        with pytest.raises(WorkerNotFoundError):
            ask("other")
    with pytest.raises(WorkerNotFoundError):
        scheduler.create_workers(job("ref", 1, "colocation", "other"))


def test_a_role_is_created_once(scheduler):
    scheduler.create_workers(job())
    with pytest.raises(WorkerConfigurationError, match="already"):
        scheduler.create_workers(job())
    scheduler.delete_workers("actor")
    scheduler.create_workers(job())


def test_errors_of_engines_name_worker_method_and_cause(scheduler):
    (one,) = with_echo(scheduler, scheduler.create_workers(job("actor", 1)))
    with pytest.raises(EngineCallError, match="actor/0: oops raised KeyError") as caught:
        scheduler.call_engine(one, "oops")
    error = caught.value
    assert (error.worker_id, error.role, error.method) == ("actor/0", "actor", "oops")
    assert isinstance(error.cause, KeyError)
    with pytest.raises(EngineCreationError, match="no luck") as caught:
        scheduler.create_engine(one, ECHO, "b", fail="no luck")
    assert isinstance(caught.value.cause, ValueError)
    with pytest.raises(EngineImportError, match="can't be imported"):
        scheduler.create_engine(one, "engines.Nothing", "b")
    with pytest.raises(EngineCallError, match="argument"):
        scheduler.call_engine(one, "nap")
    assert scheduler.call_engine(one, "say")[0] == one


def test_engines_that_are_not_allowed_are_not_sent(cluster):
    with RayScheduler(cluster, group_class=InProcessGroup, engine_paths=["engines.*"]) as scheduler:
        (one,) = with_echo(scheduler, scheduler.create_workers(job("actor", 1)))
        for make in (scheduler.create_engine, scheduler.configure_worker):
            with pytest.raises(EngineImportError, match="not among"):
                make(one, "os.system", "b")
    with pytest.raises(TypeError, match="sequence"):
        RayScheduler(cluster, engine_paths="engines.*")


@pytest.fixture
def gate(tmp_path):
    """What holds an engine back until it is touched, at the latest after the test."""
    made = tmp_path / "gate"
    yield made
    made.touch()


def test_calls_and_creations_have_deadlines(scheduler, gate):
    (one,) = with_echo(scheduler, scheduler.create_workers(job("actor", 1)))
    with pytest.raises(WorkerTimeoutError, match="it goes on") as caught:
        scheduler.call_engine(one, "wait", None, gate, timeout_s=0.05)
    assert isinstance(caught.value, TimeoutError)
    with pytest.raises(WorkerTimeoutError):
        scheduler.create_engine(one, ECHO, "b", timeout_s=0.01)
    gate.touch()
    assert scheduler.call_engine(one, "say", "b")[0] == "", "it was created all the same"


def test_a_ping_tells_of_a_call_that_runs(scheduler, gate):
    (one,) = with_echo(scheduler, scheduler.create_workers(job("actor", 1)))
    assert scheduler.ping(one) == "ready"
    call = threading.Thread(target=scheduler.call_engine, args=(one, "wait", None, gate))
    call.start()
    eventually(lambda: scheduler.ping(one) == "busy", "it is called")
    status = scheduler.ping(one)
    assert status.method == "call" and 0 <= status.silent_s < PATIENCE_S
    gate.touch()
    call.join()
    assert scheduler.ping(one) == "ready"


def test_the_groups_of_a_role_are_all_asked_at_once(cluster):
    together = threading.Barrier(3)

    class Asked(InProcessGroup):
        def ping(self, ranks=None, timeout=1.0):
            together.wait(PATIENCE_S)
            return super().ping(ranks, timeout)

    with RayScheduler(cluster, group_class=Asked) as scheduler:
        scheduler.create_workers(job("actor", 3, "separate"))
        assert len(scheduler.get_workers("actor", timeout=PATIENCE_S)) == 3


@pytest.mark.parametrize("ray_knows", [True, False])
def test_a_worker_that_is_seen_dead_is_told_of_with_the_cause(cluster, ray_knows):
    class Dead(InProcessGroup):
        def ping(self, ranks=None, timeout=1.0):
            return {**super().ping(ranks, timeout), 1: WorkerStatus("dead")}

        def _deliver(self, dispatch, timeout):
            if dispatch.method.name != "ping":
                return super()._deliver(dispatch, timeout)
            if not ray_knows:
                raise ResultTimeoutError("not yet", [1])
            raise WorkerFailureError("killed by signal 9", cause=ActorDiedError(), log_tail="the last words")

    with RayScheduler(cluster, group_class=Dead) as scheduler:
        scheduler.create_workers(job())
        with pytest.raises(WorkerFailedError, match="actor/1 has died") as caught:
            scheduler.get_workers("actor")
        assert caught.value.worker_id == "actor/1"
        if ray_knows:
            assert "killed by signal 9" in str(caught.value)
            assert isinstance(caught.value.cause.cause, ActorDiedError)
            assert caught.value.log_tail == "the last words"


def test_engines_are_made_and_called_with_arguments_by_name(scheduler):
    (one,) = scheduler.create_workers(job("actor", 1))
    scheduler.create_engine(worker_id=one, engine=ECHO, engine_name="model", word="hey")
    said = scheduler.call_engine(worker_id=one, method="say", engine_name="model", x=1, timeout_s=PATIENCE_S)
    assert said == ("hey", (), {"x": 1})


def test_engines_are_made_and_called_from_a_loop(scheduler, gate):
    ids = scheduler.create_workers(job())

    async def both():
        await asyncio.gather(*(scheduler.async_create_engine(one, ECHO, None, one) for one in ids))
        said = await asyncio.gather(*(scheduler.async_call_engine(one, "say") for one in ids))
        with pytest.raises(EngineCallError, match="KeyError"):
            await scheduler.async_call_engine(ids[0], "oops")
        with pytest.raises(WorkerTimeoutError):
            await scheduler.async_call_engine(ids[0], "wait", None, gate, timeout_s=0.01)
        gate.touch()
        return [word for word, *_ in said]

    assert asyncio.run(both()) == ids


@pytest.mark.parametrize("strategy", ["shared", "separate"])
def test_a_head_gives_arguments_to_its_peers(scheduler, tmp_path, strategy):
    ids = scheduler.create_workers(job("actor", 3, strategy))
    for one in ids:
        scheduler.create_engine(one, "engines.Peer", None, tmp_path)
    assert scheduler.call_peers(ids, "add", None, 1, other=2) == [3, 3, 3]
    with pytest.raises(EngineCallError, match="no method 'multiply'"):
        scheduler.call_peers(ids, "multiply", None, 1)
    with_echo(scheduler, scheduler.create_workers(job("other", 1)))
    with pytest.raises(EngineCallError, match="no method 'broadcast_arguments'"):
        scheduler.call_peers(["other/0"], "say")


def test_peers_have_a_process_each(scheduler, tmp_path):
    scheduler.create_workers(job("actor", 1))
    scheduler.create_workers(job("ref", 1, "colocation", "actor"))
    for one in ("actor/0", "ref/0"):
        scheduler.create_engine(one, "engines.Peer", None, tmp_path)
    for ids in (["ref/0", "actor/0"], ["actor/0", "actor/0"]):
        with pytest.raises(WorkerConfigurationError, match="two share one"):
            scheduler.call_peers(ids, "add", None, 1, other=2)


def test_peers_do_not_wait_for_a_head_that_fails(scheduler, tmp_path):
    ids = scheduler.create_workers(job("actor", 2))
    for one in ids:
        scheduler.create_engine(one, "engines.Peer", None, tmp_path)
    with pytest.raises(EngineCallError, match="actor/0: add raised ValueError"):
        scheduler.call_peers(ids, "add", None, "wrong", timeout_s=PATIENCE_S)
    with pytest.raises(WorkerTimeoutError, match=r"\['actor/1'\]"):  # it still waits for the head
        scheduler.call_peers(["actor/1"], "add", None, 1, other=2, timeout_s=0.1)
    (tmp_path / "arguments").write_bytes(pickle.dumps(((1,), {"other": 2})))


class Unreachable(InProcessGroup):
    """Workers that can't be reached for some calls, before those begin, or after they have returned."""

    drops: ClassVar[list[str]] = []
    others_call: ClassVar[Callable[[], object]]

    def _deliver(self, dispatch, timeout):
        if dispatch.method.name != "call" or not self.drops:
            return super()._deliver(dispatch, timeout)
        if (when := self.drops.pop()) != "before":
            super()._deliver(dispatch, timeout).get_results()
        if when == "long after":
            self.others_call()
        raise WorkerFailureError("out of reach", cause=ActorUnavailableError("out of reach", None))


def counted_past(drops, cluster):
    """What a call that counts gives, past what is lost, and how often it ran."""
    with RayScheduler(cluster, group_class=Unreachable, call_timeout_s=PATIENCE_S) as scheduler:
        (one,) = with_echo(scheduler, scheduler.create_workers(job("actor", 1)))
        Unreachable.others_call = lambda _: [scheduler.call_engine(one, "say") for _ in range(1001)]
        Unreachable.drops[:] = drops
        try:
            told = scheduler.call_engine(one, "count")
        except WorkerFailedError:
            told = "failed"
        Unreachable.drops.clear()
        return told, scheduler.call_engine(one, "count") - 1


def test_a_call_is_sent_again_only_if_it_surely_never_began(cluster):
    assert counted_past(["before"], cluster) == (1, 1)
    assert counted_past(["before", "before"], cluster) == (1, 1)
    assert counted_past(["after"], cluster) == ("failed", 1)
    assert counted_past(["long after"], cluster) == ("failed", 1)
    assert counted_past(["before"] * 3, cluster) == ("failed", 0)


@dataclass
class Handle:
    """Stands for bytes."""

    value: bytes


class Handles:
    """A transport of bytes as handles."""

    def encode(self, value):
        return Handle(value) if isinstance(value, bytes) else value

    def decode(self, value):
        return value.value if isinstance(value, Handle) else value


def test_arguments_are_localised_and_results_remotised(cluster):
    with RayScheduler(cluster, group_class=InProcessGroup, transport=Handles()) as scheduler:
        (one,) = with_echo(scheduler, scheduler.create_workers(job("actor", 1)))
        result = scheduler.call_engine(one, "later", None, b"much")
        assert result == Handle(b"much")
        assert scheduler.call_engine(one, "say", None, result, x=result)[1:] == ((b"much",), {"x": b"much"})


def test_engines_end_on_number_0_last(scheduler, tmp_path):
    path = tmp_path / "ends"
    for worker_id in scheduler.create_workers(job("actor", 3)):
        seconds = 0.0 if worker_id == "actor/0" else 0.1
        scheduler.create_engine(worker_id, CLOSING, None, path, worker_id, seconds)
    assert scheduler.delete_workers("actor")
    ends = path.read_text().split()
    assert (sorted(ends[:2]), ends[2:]) == (["actor/1", "actor/2"], ["actor/0"])


@pytest.mark.parametrize("role", ["actor", None])
def test_engines_end_one_after_the_other_if_they_are_to(scheduler, tmp_path, role):
    path = tmp_path / "ends"
    for worker_id in scheduler.create_workers(job("actor", 3, "separate")):
        scheduler.create_engine(worker_id, CLOSING, None, path, worker_id, 0.05 * int(worker_id[-1]))
    assert scheduler.delete_workers(role, reverse_order=True)
    assert path.read_text().split() == ["actor/2", "actor/1", "actor/0"]


def test_an_engine_that_ends_badly_is_told_of_and_the_rest_ends(scheduler, cluster, tmp_path):
    path = tmp_path / "ends"
    for worker_id in scheduler.create_workers(job()):
        scheduler.create_engine(worker_id, CLOSING, None, path, worker_id, fail=worker_id == "actor/1")
    assert scheduler.delete_workers("actor") is False
    assert path.read_text().split() == ["actor/1", "actor/0"]
    assert cluster.holders() == {}


def test_without_any_time_engines_are_not_asked_to_end(scheduler, cluster, tmp_path):
    (one,) = scheduler.create_workers(job("actor", 1))
    scheduler.create_engine(one, CLOSING, None, tmp_path / "ends", "a")
    assert scheduler.delete_workers("actor", timeout=0) is False
    assert not (tmp_path / "ends").exists()
    assert cluster.holders() == {}


def test_an_engine_can_be_ended_alone(scheduler, tmp_path):
    (one,) = scheduler.create_workers(job("actor", 1))
    scheduler.create_engine(one, CLOSING, None, tmp_path / "ends", "a", fail=True)
    with pytest.raises(EngineCallError, match="did not end well"):
        scheduler.destroy_engine(one)
    assert scheduler.destroy_engine(one) is False


def test_workers_are_configured(scheduler, monkeypatch):
    monkeypatch.setenv("RAYCREW_TEST_SEED", "")
    (one,) = with_echo(scheduler, scheduler.create_workers(job("actor", 1)))
    scheduler.set_worker_env(one, {"RAYCREW_TEST_SEED": "1"})
    assert scheduler.call_engine(one, "env", None, "RAYCREW_TEST_SEED") == ["1"]
    assert scheduler.configure_worker(one, "engines.seeded", 7) == 7
    with pytest.raises(WorkerConfigurationError, match="no seed"):
        scheduler.configure_worker(one, "engines.refuses")
    with pytest.raises(WorkerConfigurationError, match="A=B"):
        scheduler.set_worker_env(one, {"A=B": "1"})


def test_what_workers_are_to_be_given_gets_to_their_group(cluster, monkeypatch):
    given = []

    class Given(InProcessGroup):
        def __init__(self, *args, **options):
            given.append(options)
            super().__init__(*args, **options)

    monkeypatch.setenv("RAYCREW_TEST_SECRET", "hush")
    common = {"secrets": ["RAYCREW_TEST_SECRET"], "port_range": (23400, 23500), "startup_timeout_s": 50.0}
    with RayScheduler(cluster, group_class=Given, **common) as scheduler:
        scheduler.create_workers(job(specs=[SchedulingSpec(cmd=["nice"], port_count=3)]))
    (options,) = given
    assert (options["secrets"], options["port_range"]) == (["RAYCREW_TEST_SECRET"], (23400, 23500))
    assert (options["ports_per_worker"], options["launchers"]) == (3, {"*": ["nice"]})
    assert 0 < options["init_timeout_s"] <= 50


def test_an_environment_is_that_of_the_class_that_is_named():
    class Known:
        def python_for(self, actor_class_fqn, runner):
            return f"/env/{actor_class_fqn}/{runner}"

    (plan,) = plan_groups(Job("actor", 1, [SchedulingSpec(environment="my.Engine")]))
    assert environment_of(plan, Known()).python_for("RayRPCServer", "here") == "/env/my.Engine/here"
    with pytest.raises(WorkerConfigurationError, match="give the scheduler environments"):
        environment_of(plan, None)
    (plan,) = plan_groups(Job("actor", 1))
    assert environment_of(plan, "auto") == "auto"


def test_an_error_of_an_engine_that_has_a_scheduler_of_its_own_is_a_cause(scheduler):
    (one,) = with_echo(scheduler, scheduler.create_workers(job("actor", 1)))
    with pytest.raises(EngineCallError, match="actor/0: nested: it raised WorkerTimeoutError") as caught:
        scheduler.call_engine(one, "nested")
    assert caught.value.cause.worker_id == "inner/0"
    with pytest.raises(EngineCallError, match="actor/0: closed: it raised SchedulerClosedError"):
        scheduler.call_engine(one, "closed")


def test_who_asks_for_a_role_that_is_being_created_waits_for_it(cluster):
    begun, go_on = threading.Event(), threading.Event()

    class Slow(InProcessGroup):
        def _start(self):
            begun.set()
            go_on.wait(PATIENCE_S)
            return super()._start()

    with RayScheduler(cluster, group_class=Slow) as scheduler:
        creation = threading.Thread(target=scheduler.create_workers, args=(job(),))
        creation.start()
        assert begun.wait(PATIENCE_S)
        with pytest.raises(WorkerTimeoutError, match="still being created"):
            scheduler.get_workers("actor", timeout=0.01)
        with pytest.raises(WorkerTimeoutError):
            scheduler.delete_workers("actor", timeout=0.01)
        with pytest.raises(WorkerNotFoundError):
            scheduler.ping("actor/0")
        go_on.set()
        assert len(scheduler.get_workers("actor", timeout=PATIENCE_S)) == 2
        creation.join()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_role_of_which_a_part_fails_leaves_nothing(cluster, strategy):
    started = []

    class Failing(InProcessGroup):
        def _start(self):
            if self._spec.name in ("actor", "actor/1"):
                raise WorkerCreationError("not this one")
            started.append(self)
            return super()._start()

    with RayScheduler(cluster, group_class=Failing) as scheduler:
        with pytest.raises(WorkerCreationError, match="not this one"):
            scheduler.create_workers(job(strategy=strategy, replicas=2))
        assert cluster.holders() == {}
        assert [repr(group) for group in started if "shut down" not in repr(group)] == []
        with pytest.raises(WorkerNotFoundError):
            scheduler.get_workers("actor")


def test_the_failure_of_one_part_gives_up_the_others(cluster):
    waits, told = threading.Semaphore(0), []

    class Failing(InProcessGroup):
        def _start(self):
            if self._spec.name == "actor/1":
                waits.acquire(timeout=PATIENCE_S)
                waits.acquire(timeout=PATIENCE_S)
                raise WorkerCreationError("not this one")
            if self._spec.name != "ref":
                waits.release()
                told.append(f"waited in vain: {is_done(Future(), PATIENCE_S)}")  # as what waits for Ray does
            return super()._start()

    with RayScheduler(cluster, group_class=Failing) as scheduler:
        with pytest.raises(WorkerCreationError, match="not this one"):
            scheduler.create_workers(job("actor", 3, "separate"))
        assert (told, cluster.holders()) == ([], {})
        assert len(scheduler.create_workers(job("ref", 4))) == 4, "all places are free"


def test_a_role_is_late_whose_workers_do_not_tell_their_devices(monkeypatch):
    told, cluster = threading.Event(), FakeCluster([2], use_gpus=True)
    monkeypatch.setattr(_server, "visible_devices", lambda _: told.wait(PATIENCE_S) and {})
    with RayScheduler(cluster, group_class=InProcessGroup) as scheduler:
        with pytest.raises(WorkerTimeoutError, match="in time"):
            scheduler.create_workers(job(specs=[SchedulingSpec(gpu=1)]), timeout_s=0.2)
        assert not told.is_set()
        told.set()
        assert cluster.holders() == {}


def test_a_role_that_is_created_during_the_close_ends(cluster):
    begun, go_on, caught = threading.Event(), threading.Event(), []

    class Slow(InProcessGroup):
        def _start(self):
            begun.set()
            go_on.wait(PATIENCE_S)
            return super()._start()

    def create():
        try:
            scheduler.create_workers(job())
        except SchedulerClosedError as error:
            caught.append(error)

    scheduler = RayScheduler(cluster, group_class=Slow)
    creation = threading.Thread(target=create)
    creation.start()
    assert begun.wait(PATIENCE_S)
    closing = threading.Thread(target=scheduler.close)
    closing.start()
    while not scheduler._roles._closed:
        pass
    go_on.set()
    creation.join()
    closing.join()
    assert (len(caught), cluster.holders(), repr(scheduler)) == (1, {}, "RayScheduler(no roles)")


def test_what_is_made_after_an_interrupt_is_given_back(cluster, monkeypatch):
    go_on, threads = threading.Event(), []

    class Slow(InProcessGroup):
        def _start(self):
            if self._spec.name != "actor/0":
                go_on.wait(PATIENCE_S)
            return super()._start()

    def interrupted(function, items):
        threads.extend(threading.Thread(target=function, args=(item,)) for item in items)
        for thread in threads:
            thread.start()
        threads[0].join()
        raise KeyboardInterrupt

    monkeypatch.setattr(_creation, "in_threads", interrupted)
    with RayScheduler(cluster, group_class=Slow) as scheduler:
        with pytest.raises(KeyboardInterrupt):
            scheduler.create_workers(job("actor", 3, "separate"))
        go_on.set()
        for thread in threads:
            thread.join()
        assert cluster.holders() == {}
        assert len(scheduler.create_workers(job("actor", 4))) == 4, "all places are free"


def test_a_closed_scheduler_is_empty_and_takes_nothing(cluster):
    with RayScheduler(cluster, group_class=InProcessGroup) as scheduler:
        ids = scheduler.create_workers(job())
        assert repr(scheduler) == "RayScheduler(actor)"
    assert cluster.holders() == {}
    assert scheduler.close() is True
    for use in (lambda: scheduler.create_workers(job()), lambda: scheduler.ping(ids[0])):
        with pytest.raises(SchedulerClosedError):
            use()
    assert issubclass(SchedulerClosedError, SchedulerError)


def test_where_is_a_cluster_or_a_connection():
    with pytest.raises(TypeError, match="where"):
        RayScheduler("auto")
