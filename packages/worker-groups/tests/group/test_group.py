import asyncio
import threading
from collections import UserString

import pytest
import ray
import workers
from workers import AsyncWorker, Configured, Decorated, Grouped, Worker

from raycrew.cluster_core import Occupant, RayVirtualCluster, init_ray
from raycrew.cluster_core.testing import connected
from raycrew.worker_groups import (
    NamedSharding,
    RayWorkerBuilder,
    RayWorkerGroup,
    UnknownMethodError,
    WorkerGroupClosedError,
)

RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@pytest.fixture(scope="module")
def cluster(local_ray_session):
    """Bundles for groups of a test's own."""
    with connected(local_ray_session), RayVirtualCluster([4], use_gpus=False) as made:
        yield made


@pytest.fixture(scope="module")
def group(cluster):
    """A group for all tests, on bundles of its own."""
    sharding = NamedSharding([[0, 1], [2, 3]], ["dp", "tp"])
    with (
        RayVirtualCluster([4], use_gpus=False) as own,
        RayWorkerGroup(own, Worker, base=10, sharding_annotations=sharding) as made,
    ):
        yield made


@pytest.mark.smoke
def test_calls_reach_every_rank_in_rank_order(group):
    assert group.call("where").get_results() == group.call(Worker.where).get_results()
    assert [w.rank for w in group.call("where").get_results()] == [0, 1, 2, 3]
    assert group.run_all_workers_single_data("add", 1, y=2, z=3).get_results() == [16] * 4
    assert ray.get(group.run_all_workers_multiple_data("add", [1, 2, 3, 4])) == [11, 12, 13, 14]
    assert group.run_rank_zero("add", 1).get_results() == [11]
    assert group.run_single_worker_single_data("pid", 2).get_results() == [group.call("pid").get_results()[2]]
    assert group.on(ranks=[3, 1]).call("echo", "x").get_results() == [(3, ("x",), {}), (1, ("x",), {})]


def test_workers_have_the_ranks_they_are_told(group):
    for rank, env in enumerate(group.call("environment", *RANK_VARIABLES).get_results()):
        info = group.ranks[rank]
        assert env["RANK"] == env["LOCAL_RANK"] == str(rank)
        assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "4"
        assert env["NODE_RANK"] == "0"
        assert env["MASTER_ADDR"] == group.master_address == info.master_address
        assert env["MASTER_PORT"] == str(group.master_port)
        assert (info.rank, info.group_name, info.generation) == (rank, "Worker", 0)
    ports = [port for info in group.ranks for port in info.ports]
    assert len({*ports, group.master_port}) == 9


def test_the_environment_is_set_before_the_class_is_imported(cluster, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "hush")
    with RayWorkerGroup(
        cluster, "workers.Worker", 2, env_vars={"COLOUR": "red"}, secrets=("API_TOKEN",)
    ) as group:
        seen = group.call("at_import").get_results()
    # The module is unpickled by reference, so what it saw at import is what the worker had by then.
    assert seen == [
        {"RANK": str(rank), "WORLD_SIZE": "2", "COLOUR": "red", "API_TOKEN": "hush"} for rank in range(2)
    ]


@pytest.mark.hostile
def test_secrets_of_the_connection_reach_workers(cluster, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "me:hush@proxy")
    monkeypatch.setenv("API_TOKEN", "the group's own")
    with (
        init_ray(secrets={"API_TOKEN": "hush", "OTHER_TOKEN": "hush-hush"}),
        RayWorkerGroup(cluster, Worker, 1, secrets=("API_TOKEN",)) as group,
    ):
        (got,) = group.call("environment", "API_TOKEN", "OTHER_TOKEN", "HTTPS_PROXY").get_results()
    assert got == {"API_TOKEN": "the group's own", "OTHER_TOKEN": "hush-hush", "HTTPS_PROXY": "me:hush@proxy"}


def test_what_a_worker_gets_and_what_it_does_not(cluster, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    from_start = {"runtime_env": {"env_vars": {"SLURM_PROCID": "7", "PLAIN": "seen"}}}
    with RayWorkerGroup(
        cluster,
        RayWorkerBuilder(Worker).options(**from_start),
        1,
        env_vars={"OMP_NUM_THREADS": "3"},
        async_communication=True,
        progress=True,
    ) as group:
        assert group.call("environment", "OMP_NUM_THREADS", "SLURM_PROCID", "PLAIN").get_results() == [
            {"OMP_NUM_THREADS": "3", "SLURM_PROCID": None, "PLAIN": "seen"}
        ]
        (here,) = group.call("where").get_results()
    assert (here.communication.asynchronous, here.communication.gradient_compression) == (True, False)
    bar = capsys.readouterr().err
    assert "Worker: import and __init__" in bar
    assert "1/1" in bar


def test_user_code_runs_on_the_main_thread(group):
    assert group.call("main_thread").get_results() == [True] * 4


def test_handles_are_real_ray_handles(group):
    handle = group.workers[2]
    assert ray.get(handle.add.remote(1)) == 11
    assert ray.get(handle._hidden.remote()) == "seen"
    assert ray.get(handle.double.remote(4)) == 8
    assert ray.get(handle.label.remote()) == "Worker"
    assert [ray.get(item) for item in handle.count_to.remote(3)] == [0, 1, 2]
    with pytest.raises(TypeError):
        handle.add.remote()
    with pytest.raises(AttributeError):
        handle.nope.remote()


def test_bad_calls_fail_before_anything_is_sent(group):
    group.call("keep", "before").get_results()
    with pytest.raises(UnknownMethodError, match="no method 'kepe'; it has: add"):
        group.call("kepe", "after")
    with pytest.raises(TypeError, match="missing a required argument: 'value'"):
        group.call("keep")
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        group.run_all_workers_single_data("keep", "after", other=1)
    with pytest.raises(ValueError, match="3 items for 4 ranks"):
        group.run_all_workers_multiple_data("keep", ["after"] * 3)
    with pytest.raises(ValueError, match="rank 4 is outside 0 to 3"):
        group.on(ranks=[1, 4]).call("keep", "after")
    assert group.call("get_kept").get_results() == ["before"] * 4


def test_generators_give_their_items(group):
    assert group.call("count_to", 3).get_results() == [[0, 1, 2]] * 4
    future = group.on(ranks=[0, 2]).call("count_to", 2)
    assert sorted(future.as_completed()) == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert future.get_results() == [[0, 1], [0, 1]]
    assert sorted(group.stream(Worker.count_to, 1)) == [(rank, 0) for rank in range(4)]


def test_a_future_is_an_argument_without_passing_the_driver(group):
    first = group.run_all_workers_multiple_data("add", [1, 2, 3, 4])
    assert group.call("total", first).get_results() == [50] * 4
    assert group.run_all_workers_multiple_data("add", first).get_results() == [21, 22, 23, 24]
    assert group.call("add", ray.put(5), y=first[0]).get_results() == [26] * 4


def test_a_group_fits_a_drawing_and_tells_of_its_start(group, capsys):
    assert isinstance(group, Occupant)
    assert group.name == "Worker"
    assert [(p.rank, p.bundle_index, p.share, p.tied_group) for p in group.placements] == [
        (rank, rank, 1.0, None) for rank in range(4)
    ]
    assert [m["name"] for m in group.worker_metadata] == [f"Worker-0-{i}" for i in range(4)]
    assert group.startup.workers.keys() == {0, 1, 2, 3}
    for phases in group.startup.workers.values():
        assert 0 < sum(phases.values()) <= group.startup.total_s
    group.print_worker_layout()
    group.print_startup()
    printed = capsys.readouterr().out
    for phase in ("environment", "placement", "process", "import", "init"):
        assert phase in printed
    for info in group.ranks:
        assert info.node_address in printed


def test_use_after_shutdown_raises(cluster):
    group = RayWorkerGroup(cluster, Worker, 1)
    assert group.shutdown()
    assert group.shutdown()
    for use in (lambda: group.call("pid"), lambda: group.on(), lambda: group.run_rank_zero("pid")):
        with pytest.raises(WorkerGroupClosedError, match="'Worker' was shut down"):
            use().call("pid")
    cluster.claim(None, "the next").release()


@pytest.mark.smoke
def test_async_workers(cluster):
    with RayWorkerGroup(cluster, AsyncWorker, [2]) as group:
        assert group.call("slowly", 3).get_results() == [3, 3]
        assert group.call("rank").get_results() == [0, 1]
        assert group.call("gather", group.call("rank")).get_results() == [1, 1]
        assert group.call("count_to", 2).get_results() == [[0, 1], [0, 1]]

        async def both():
            return await group.call("slowly", 1), await group.call("rank")

        assert asyncio.run(both()) == ([1, 1], [0, 1])


def test_a_decorated_class(cluster):
    with RayWorkerGroup(cluster, RayWorkerBuilder(Decorated, name="x"), 2) as group:
        assert group.call("get_name").get_results() == ["x", "x"]


def test_a_concurrency_group_answers_while_another_is_busy(cluster, tmp_path):
    builder = RayWorkerBuilder(Grouped).options(concurrency_groups={"side": 1})
    with RayWorkerGroup(cluster, builder, 1) as group:
        busy = group.call("plain", str(tmp_path / "gate"))
        (side,) = group.call("side").get_results()
        (tmp_path / "gate").touch()
        (plain,) = busy.get_results()
    assert side != plain


def test_a_class_of_this_very_module(cluster):
    class Local:
        def answer(self):
            return 42

    with RayWorkerGroup(cluster, Local, 2) as group:
        assert group.call(Local.answer).get_results() == [42, 42]


def test_configure_worker_has_its_say(cluster):
    with RayWorkerGroup(
        cluster, Configured, bundle_indices_list=[(0, [2, 0]), (0, [3])], env_vars={"COLOUR": "red"}, other=1
    ) as group:
        assert group.call("answer").get_results() == [
            ((0, (0, [2, 0]), 0), 1, "green", "(0, [2, 0])"),
            ((0, None, 0), 1, "green", "None"),
            ((0, (0, [3]), 0), 1, "green", "(0, [3])"),
        ]
        assert group.tied_workers_groups == [[0, 1], [2]]
        assert group.group_count == 2
        assert group.worker_to_tied_group_index == {0: 0, 1: 0, 2: 1}
        assert [p.bundle_index for p in group.placements] == [2, 0, 3]
        assert [m["name"] for m in group.worker_metadata] == [
            "Configured-grp0-0",
            "Configured-grp0-1",
            "Configured-0-2",
        ]


def test_tied_groups_are_called_as_asked(cluster):
    with RayWorkerGroup(cluster, Worker, bundle_indices_list=[[0, 1], [2, 3]]) as group:
        leaders = group.run_all_workers_single_data("nap", 0, only_on="tied_leader")
        assert (leaders.called_workers, leaders.get_results()) == ([0, 2], [0, 2])
        assert group.on(leaders=True).call(Worker.nap, 0).get_results() == [0, 2]
        tied = group.run_all_workers_multiple_data("echo", ["a", "b"], only_on="all_tied_workers")
        assert tied.called_workers == [0, 1, 2, 3]
        assert tied.get_results() == [(0, ("a",), {}), (2, ("b",), {})]
        assert ray.get(tied)[1] == (1, ("a",), {})
        stream = group.run_all_workers_single_data("count_to", 2, only_on="all_tied_workers")
        assert sorted(stream.as_completed()) == [(0, 0), (0, 1), (2, 0), (2, 1)]
        assert stream.get_results() == [[0, 1], [0, 1]]


def test_sharded_and_replicated_axes(group):
    axes = {"in_sharded_axes": ["dp"], "replicate_on_axes": ["tp"], "output_is_replicated": ["tp"]}
    future = group.run_all_workers_sharded_data("echo", ["a", "b"], **axes)
    assert future.get_results() == [(0, ("a",), {}), (2, ("b",), {})]
    assert ray.get(future)[3] == (3, ("b",), {})
    assert group.call_sharded(Worker.echo, ["a", "b"], **axes).get_results() == future.get_results()
    free = group.run_all_workers_sharded_data(
        "echo", ["a", "b"], in_sharded_axes=["dp"], make_dummy_calls_to_free_axes=True
    )
    assert ray.get(free) == [(0, ("a",), {}), (1, (None,), {}), (2, ("b",), {}), (3, (None,), {})]
    assert free.get_results() == [(0, ("a",), {}), (2, ("b",), {})]
    only = group.run_all_workers_single_data("nap", 0, run_rank_0_only_axes=["tp"])
    assert (only.called_workers, only.get_results()) == ([0, 2], [0, 2])


def test_arguments_of_init_are_checked_first(cluster):
    with pytest.raises(TypeError, match="unexpected keyword argument 'bsae'"):
        RayWorkerGroup(cluster, Worker, bsae=1)
    with pytest.raises(ValueError, match="num_cpus=99 is more than the worker's share"):
        RayWorkerGroup(cluster, RayWorkerBuilder(Worker).options(num_cpus=99))
    with pytest.raises(TypeError, match="not a fully qualified name"):
        RayWorkerGroup(cluster, "Worker")
    with pytest.raises(ValueError, match="not set"):
        RayWorkerGroup(cluster, Worker, secrets=("NO_SUCH_TOKEN",))
    cluster.claim(None, "the next").release()


class Odd(UserString):
    """What can't be told at a glance to be picklable."""


class Boxes:
    """Puts strings in boxes on their way, and takes them out."""

    def encode(self, value):
        return {"box": value} if isinstance(value, str) else value

    def decode(self, value):
        return value["box"] if isinstance(value, dict) and "box" in value else value


def test_a_transport_sees_arguments_and_results(cluster):
    builder = RayWorkerBuilder(Worker, "base")
    with RayWorkerGroup(cluster, builder, 2, transport=Boxes()) as group:
        assert group.call("add", "x", y="y", z="z").get_results() == [{"box": "basexyz"}] * 2
        assert group.call("total", group.call("nap", 0)).get_results() == [1, 1]
        assert group.call("echo", group.on(ranks=[0]).call("add", "x", "", z="")).get_results()[1] == (
            1,
            (["basex"],),
            {},
        )
    with pytest.raises(TypeError, match="no ArgumentTransport"):
        RayWorkerGroup(cluster, Worker, transport=42)


def test_arguments_that_cannot_travel_are_refused_before_anything_is_sent(group):
    group.call("keep", "before").get_results()
    with pytest.raises(TypeError, match=r"Worker\.keep: an argument of rank 2 can't be pickled"):
        group.run_all_workers_multiple_data("keep", [1, {"two": [2]}, threading.Lock(), 4])
    with pytest.raises(TypeError, match="lock"):
        group.call("keep", threading.Lock())
    with pytest.raises(TypeError, match=r"Worker\.count_to is a generator method"):
        group.run_all_workers_multiple_data("keep", [1, 2, 3, group.call("count_to", 2)])
    assert group.call("get_kept").get_results() == ["before"] * 4
    group.run_all_workers_multiple_data("keep", [1, Odd("two"), group.call("nap", 0), Odd("four")])
    assert [str(kept) for kept in group.call("get_kept").get_results()] == [
        "1",
        "two",
        "[0, 1, 2, 3]",
        "four",
    ]


class Blob:
    """Tells how often it was pickled; large, to those who ask."""

    def __init__(self, nbytes):
        self.nbytes = nbytes
        self.pickled = 0

    def __reduce__(self):
        self.pickled += 1
        return Blob, (self.nbytes,)


def test_a_large_argument_is_stored_once_and_a_small_one_goes_along_with_each_call(group):
    shared, small, shards = Blob(1 << 20), Blob(10), [Blob(1 << 20), Blob(1 << 20)]
    group.call("keep", shared).get_results()
    group.call("keep", small).get_results()
    axes = {"in_sharded_axes": ["dp"], "replicate_on_axes": ["tp"]}
    group.run_all_workers_sharded_data("keep", shards, **axes).get_results()
    assert [kept.nbytes for kept in group.call("get_kept").get_results()] == [1 << 20] * 4
    assert (shared.pickled, [shard.pickled for shard in shards]) == (1, [1, 1])
    assert small.pickled >= 4


def test_the_module_of_the_workers_is_the_one_beside_this_file():
    assert workers.AT_IMPORT["RANK"] is None
