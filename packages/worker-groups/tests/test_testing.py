import asyncio
import inspect
import math
import os
import subprocess
import sys
import threading

import pytest
from patience import eventually
from workers import AsyncWorker, Configured, Decorated, Worker

from raycrew.cluster_core import BundlesOccupiedError, Occupant
from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import (
    NamedSharding,
    RayWorkerBuilder,
    RayWorkerGroup,
    ResultTimeoutError,
    UnknownMethodError,
    WorkerFailureError,
    WorkerFailuresError,
    WorkerGroupClosedError,
    WorkerGroupError,
    WorkerStartTimeoutError,
    current_worker,
)
from raycrew.worker_groups.testing import InProcessGroup


@pytest.fixture
def cluster():
    return FakeCluster([2, 2])


@pytest.fixture
def group(cluster):
    with InProcessGroup(cluster, Worker, base=10) as made:
        yield made


@pytest.mark.smoke
def test_it_is_called_like_a_group_on_ray(group):
    assert group.call(Worker.add, 1, z=2).get_results() == [13] * 4
    assert [w.rank for w in group.call("where").get_results()] == [0, 1, 2, 3]
    assert [(w.node_rank, w.local_rank) for w in group.ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert group.run_all_workers_multiple_data("add", [1, 2, 3, 4]).get_results() == [11, 12, 13, 14]
    assert group.on(ranks=[3]).call("add", 1).get_results() == [11]
    assert sorted(group.call("count_to", 2).as_completed()) == [(r, i) for r in range(4) for i in range(2)]
    assert sorted(group.on(ranks=[1]).stream(Worker.count_to, 2)) == [(1, 0), (1, 1)]
    assert group.call("total", group.call("add", 1)).get_results() == [44] * 4
    assert isinstance(group, Occupant)


def test_a_task_is_shown_by_what_it_calls(group):
    async def shown():
        task = asyncio.create_task(group.call(Worker.add, 1))
        return repr(task), await task

    text, results = asyncio.run(shown())
    assert "coro=<Worker.add()>" in text and results == [11] * 4


@pytest.mark.hostile
def test_a_workers_method_is_not_the_groups_and_the_error_says_how_to_call_it(group):
    with pytest.raises(
        AttributeError, match=r"no attribute 'add'; on its workers, call\('add', …\)"
    ) as error:
        group.add(1)
    assert (error.value.name, error.value.obj) == ("add", group)
    assert not hasattr(group, "misspelt") and not hasattr(group, "_add")
    with pytest.raises(AttributeError, match=r"no attribute 'misspelt'$"):
        _ = group.misspelt
    empty = object.__new__(type(group))
    assert not hasattr(empty, "add"), "before it is made, there is nothing to point at"


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("misspelt", "said"),
    [
        ("env_var", "^did you mean 'env_vars', an option of the group, by 'env_var'"),
        ("worker_per_node", "did you mean 'workers_per_node', an option of the group"),
        ("bases", r"did you mean 'base', by 'bases'"),
    ],
)
def test_a_misspelt_option_names_the_one_that_was_meant(cluster, misspelt, said):
    with pytest.raises(TypeError, match=said):
        InProcessGroup(cluster, Worker, **{misspelt: 1})
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zzz'$"):
        InProcessGroup(cluster, Worker, zzz=1)


def test_workers_run_at_the_same_time_on_threads_of_their_own(cluster):
    barrier = threading.Barrier(4)

    class Meeting:
        def meet(self):
            barrier.wait(60)
            return threading.current_thread().name, current_worker().rank

    with InProcessGroup(cluster, Meeting, name_prefix="m") as group:
        assert group.call("meet").get_results() == [(f"m-{rank}_0", rank) for rank in range(4)]


def test_failures_are_attributed(group, tmp_path):
    with pytest.raises(WorkerFailureError, match=r"rank 2 of 'Worker'.*told to fail") as caught:
        group.call("fail_on", [2]).get_results()
    assert (caught.value.rank, caught.value.method) == (2, "fail_on")
    with pytest.raises(UnknownMethodError):
        group.call("nope")
    with pytest.raises(ResultTimeoutError) as late:
        group.on(ranks=[1]).call("wait_for", str(tmp_path / "gate")).get_results(timeout=0.01)
    (tmp_path / "gate").touch()
    assert late.value.pending == (1,)
    with pytest.raises(TypeError, match="add is sync, not a generator"):
        group.stream("add", 1)
    assert sorted(group.stream(Worker.count_to, 2)) == sorted(
        (rank, i) for rank in range(4) for i in range(2)
    )
    with pytest.raises(TypeError, match="generator method"):
        group.call("total", group.call("count_to", 2))


def test_an_init_that_raises_frees_the_bundles(cluster):
    class Broken:
        def __init__(self):
            raise RuntimeError("not today")

    with pytest.raises((WorkerFailureError, WorkerFailuresError), match="not today"):
        InProcessGroup(cluster, Broken)
    again = "held by bundle 0: Worker;.*same lines run again.*the 'Worker' before.*shutdown"
    with InProcessGroup(cluster, Worker), pytest.raises(BundlesOccupiedError, match=again):
        InProcessGroup(cluster, Worker)
    with pytest.raises(TypeError, match="unexpected keyword argument 'bsae'"):
        InProcessGroup(cluster, Worker, bsae=1)


def test_layouts_and_axes(cluster):
    sharding = NamedSharding([[0, 1], [2, 3]], ["dp", "tp"])
    with InProcessGroup(cluster, Worker, sharding_annotations=sharding) as group:
        future = group.run_all_workers_sharded_data("echo", ["a", "b"], in_sharded_axes=["dp"])
        assert future.get_results() == [(0, ("a",), {}), (2, ("b",), {})]
    with InProcessGroup(cluster, Configured, bundle_indices_list=[(1, [1, 0]), (0, [0])]) as group:
        assert group.tied_workers_groups == [[0, 1], [2]]
        assert [told for told, *_ in group.call("answer").get_results()] == [
            (0, (1, [1, 0]), 0),
            (0, None, 0),
            (0, (0, [0]), 0),
        ]
        assert group.on(leaders=True).call("answer").called_workers == [0, 2]
        assert [p.bundle_index for p in group.placements] == [3, 2, 0]


def test_typed_calls_with_sharded_data(cluster):
    sharding = NamedSharding([[0, 1], [2, 3]], ["dp", "tp"])
    with InProcessGroup(cluster, Worker, sharding_annotations=sharding) as group:
        future = group.on(timeout=60).call_sharded(
            Worker.echo,
            ["a", "b"],
            in_sharded_axes=["dp"],
            replicate_on_axes=["tp"],
            output_is_replicated=["tp"],
            timeout=[1, 2],
        )
        assert future.called_workers == [0, 1, 2, 3]
        assert future.get_results() == [(0, ("a",), {"timeout": 1}), (2, ("b",), {"timeout": 2})]
        with pytest.raises(ValueError, match="3 items"):
            group.call_sharded("echo", [1, 2, 3], in_sharded_axes=["dp"])
        for some in (group.on(ranks=[0]), group.on(leaders=True)):
            with pytest.raises(ValueError, match="whole group"):
                some.call_sharded("echo", [1, 2], in_sharded_axes=["dp"])
    with InProcessGroup(cluster, Worker) as group, pytest.raises(ValueError, match="sharding_annotations"):
        group.call_sharded(Worker.echo, [1, 2], in_sharded_axes=["dp"])


def test_async_and_decorated_workers(cluster):
    with InProcessGroup(cluster, AsyncWorker, [1, 0]) as group:
        assert group.call("slowly", 3).get_results() == [3]
        assert group.call("count_to", 2).get_results() == [[0, 1]]

        async def awaited():
            return await group.call("slowly", 4)

        assert asyncio.run(awaited()) == [4]
    with InProcessGroup(cluster, Decorated, name="x") as group:
        assert group.call("get_name").get_results() == ["x"] * 4


def test_it_has_all_that_a_group_on_ray_has():
    public = [name for name in dir(RayWorkerGroup) if not name.startswith("_")]
    assert len(public) > 25
    assert inspect.signature(InProcessGroup) == inspect.signature(RayWorkerGroup)
    for name in public:
        ours, theirs = getattr(InProcessGroup, name), getattr(RayWorkerGroup, name)
        assert callable(ours) == callable(theirs), name
        if callable(theirs):
            assert inspect.signature(ours) == inspect.signature(theirs), name


def test_it_tells_of_itself_what_a_group_on_ray_does(cluster, capsys):
    with InProcessGroup(cluster, Worker, async_communication=True) as group:
        assert (len(group), group.group_count, group.generation, group.name) == (4, 4, 0, "Worker")
        assert [m["name"] for m in group.worker_metadata] == [
            f"Worker-{n}-{i}" for n in (0, 1) for i in (0, 1)
        ]
        assert [p.share for p in group.placements] == [1.0] * 4
        ports = [port for info in group.ranks for port in info.ports]
        assert len({*ports, group.master_port}) == 9
        assert group.call("where").get_results()[1].communication.asynchronous
        assert group.workers[2].add.remote(1, y=2).result() == 3
        assert group.startup.workers.keys() == {0, 1, 2, 3}
        group.print_worker_layout()
        group.print_startup()
    assert "start of Worker: 4 workers" in capsys.readouterr().out


def test_what_its_workers_are_up_to(group, tmp_path):
    gate = tmp_path / "gate"
    busy = group.on(ranks=[1]).call("wait_for", str(gate))
    given_up = group.on(ranks=[1]).call("keep", "never")
    given_up.cancel()
    assert group.get_worker_status(timeout=0.1)[1] == "busy"
    assert group.get_worker_status()[1].method == "wait_for"
    eventually(lambda: 1 in group.detect_stuck_workers(0.01), "it waits without a tick")
    assert group.detect_stuck_workers(0.01)[1].reason == "no_progress"
    assert group.detect_stuck_workers(600) == {}
    assert group.get_resource_usage()[1].private_bytes is None
    gate.touch()
    assert busy.get_results() == [1]
    with pytest.raises(WorkerFailureError, match="CancelledError"):
        given_up.get_results()
    assert group.call("get_kept").get_results() == [None] * 4
    assert set(group.get_worker_status(timeout=60).values()) == {"ready"}
    assert group.restart_failed_workers() == []


def test_balancing_and_transports(cluster):
    class Boxes:
        def encode(self, value):
            return {"box": value} if isinstance(value, str) else value

        def decode(self, value):
            return value["box"] if isinstance(value, dict) and "box" in value else value

    with InProcessGroup(
        cluster,
        RayWorkerBuilder(Worker, "base"),
        enable_load_balancing=True,
        load_balancing_strategy="least_loaded",
        transport=Boxes(),
    ) as group:
        assert sorted(group.balancer.call("nap", 0).get_results()[0] for _ in range(4)) == [0, 1, 2, 3]
        rest = {"common_kwargs": {"y": "", "z": ""}}
        assert list(group.balancer.map("add", "abc", **rest)) == [{"box": f"base{x}"} for x in "abc"]
        assert sorted(i for i, _ in group.balancer.as_completed("add", "abc", **rest)) == [0, 1, 2]
        added = group.on(ranks=[0]).call("add", "x", y="y", z="z")
        assert added.get_results() == [{"box": "basexyz"}]
        assert group.on(ranks=[1]).call("echo", added).get_results() == [(1, (["basexyz"],), {})]


def test_futures_can_be_arguments_of_init(cluster):
    with (
        InProcessGroup(FakeCluster([2]), Worker, base=10) as group,
        InProcessGroup(cluster, RayWorkerBuilder(Keeper, group.call("add", 1)), [1, 0]) as other,
    ):
        assert other.instances[0].value == [11, 11]


class Keeper:
    def __init__(self, value):
        self.value = value


def test_its_end(cluster, tmp_path):
    group = InProcessGroup(cluster, Worker)
    assert [type(worker) for worker in group.instances] == [Worker] * 4
    assert not group.shutdown("fail_to_clean")
    assert not group.shutdown()
    with pytest.raises(WorkerGroupClosedError):
        group.call("pid")
    assert cluster.holders() == {}
    late = InProcessGroup(cluster, Worker)
    late.on(ranks=[3]).call("wait_for", str(tmp_path / "gate"))
    assert not late.shutdown(timeout=0.1)
    assert list(late.unended) == [3]
    (tmp_path / "gate").touch()
    assert cluster.holders() == {}


def test_a_method_that_may_run_twice_is_one_that_there_is(cluster):
    said = r"idempotent_methods: .*\.Worker has no method 'ad'; did you mean 'add'\?"
    with pytest.raises(UnknownMethodError, match=said):
        InProcessGroup(cluster, Worker, idempotent_methods=["add", "ad"])
    with pytest.raises(UnknownMethodError, match=r"has no method 'nonsense'$"):
        InProcessGroup(cluster, Worker, idempotent_methods=["nonsense"])
    assert not cluster.holders()


class Counter:
    def __init__(self):
        self.n = 0

    def count(self):
        self.n += 1
        return self.n


@pytest.mark.parametrize(("time_s", "error"), [("5", TypeError), (math.nan, ValueError)])
def test_a_call_with_a_time_that_is_none_is_not_sent(cluster, time_s, error):
    with InProcessGroup(cluster, Counter) as group:
        handle = group.handle()
        for call in (
            lambda: group.call(Counter.count, timeout=time_s),
            lambda: group.on(ranks=[0], timeout=time_s).call(Counter.count),
            lambda: group.run_rank_zero("count", timeout=time_s),
            lambda: handle.call(Counter.count, timeout=time_s),
        ):
            with pytest.raises(error, match="a timeout is a number of seconds"):
                call()
        assert group.call(Counter.count).get_results(timeout=math.inf) == [1] * 4


@pytest.mark.parametrize(("time_s", "error"), [("5", TypeError), (None, TypeError), (math.nan, ValueError)])
def test_an_end_after_a_time_that_is_none_is_refused_before_anything_is_done(cluster, time_s, error):
    with InProcessGroup(cluster, Counter) as group:
        with pytest.raises(error, match="seconds"):
            group.shutdown(timeout=time_s)
        assert group.call(Counter.count).get_results() == [1] * 4


def test_an_error_that_says_nothing_is_told_by_its_type(cluster):
    class Silent:
        def fail(self):
            raise AssertionError

    with InProcessGroup(cluster, Silent) as group:
        error = group.on(ranks=[0]).call(Silent.fail).exception()
    assert "fail raised AssertionError after " in error.message


@pytest.mark.parametrize("name", [5, b"policy", ["policy"]])
def test_a_groups_name_is_a_string(cluster, name):
    with pytest.raises(TypeError, match="name_prefix is a string, not "):
        InProcessGroup(cluster, Worker, name_prefix=name)


def test_one_worker_is_told_of_as_one():
    with InProcessGroup(FakeCluster([1]), Counter) as group:
        assert repr(group).endswith("Counter, 1 worker)")
        assert repr(group.handle()) == "GroupHandle('Counter', 1 worker, generation 0)"
        assert group.startup.table().title.plain.startswith("start of Counter: 1 worker in ")
        with pytest.raises(ValueError, match="'Counter' has 1 worker, and would have 0"):
            group.remove_workers()


def test_a_group_that_nobody_ends_says_nothing_at_the_end_of_the_interpreter():
    program = """
from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups.testing import InProcessGroup
class Worker: pass
InProcessGroup(FakeCluster([2]), Worker)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_end_may_take_as_long_as_it_takes(cluster):
    group = InProcessGroup(cluster, Counter)
    assert group.shutdown(timeout=math.inf)
    assert not cluster.holders()


def test_an_init_that_is_late_is_told(cluster, tmp_path):
    gate = tmp_path / "gate"

    class Slow(Worker):
        def __init__(self):
            self.wait_for(str(gate) if current_worker().rank == 2 else None)

    with pytest.raises(WorkerStartTimeoutError, match="its __init__ did not return") as caught:
        InProcessGroup(cluster, Slow, init_timeout_s=1)
    assert "rank 2 of 'Slow'" in str(caught.value)
    gate.touch()
    assert cluster.holders() == {}


def test_outside_of_workers_there_is_no_current_one():
    with pytest.raises(WorkerGroupError, match="inside a worker"):
        current_worker()


@pytest.mark.parametrize("wrong", [float("nan"), -1.0, None, "1", True])
def test_questions_with_times_that_are_none_are_refused(wrong):
    with InProcessGroup(FakeCluster([1]), Worker) as group:
        questions = [
            group.get_worker_status,
            group.ping,
            group.get_resource_usage,
            lambda timeout: group.detect_stuck_workers(5.0, timeout),
            group.get_standby_status,
            lambda timeout: group.logs(0, timeout=timeout),
            lambda timeout: group.diagnose(timeout=timeout),
        ]
        for ask in questions:
            with pytest.raises((TypeError, ValueError), match="timeout"):
                ask(timeout=wrong)
        assert group.get_worker_status(timeout=math.inf) == {0: "ready"}
