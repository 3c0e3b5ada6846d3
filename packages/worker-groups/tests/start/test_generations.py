from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from patience import eventually
from workers import DeafListener, GeneratorListener, Listener, Worker

from raycrew.cluster_core import RayVirtualCluster, lease_ports
from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import (
    RayWorkerGroup,
    WorkerFailureError,
    WorkerGroupClosedError,
    WorkerGroupError,
)
from raycrew.worker_groups._group import renewal
from raycrew.worker_groups._group.handles import Directory
from raycrew.worker_groups._group.life import Lifecycle
from raycrew.worker_groups._group.reserve import Reserve
from raycrew.worker_groups._health import Seen, Workers
from raycrew.worker_groups._start import HOOK, startup
from raycrew.worker_groups._start.newcomers import generations
from raycrew.worker_groups.sharding import WorkerFacts, assign_ranks
from raycrew.worker_groups.testing import InProcessGroup

STANDS_BY = SimpleNamespace(facts=SimpleNamespace(pid=0, node_id="node"))


def lose(group, rank):
    with pytest.raises(WorkerFailureError, match="died"):
        group.on(ranks=[rank]).call("die_on", [rank]).get_results()
    eventually(lambda: group.get_worker_status()[rank] == "dead", "the dead worker is told")


def heard(group):
    """What each rank heard: the generations, and the ports, which are the environment's too."""
    said = group.call("get_heard").get_results(timeout=60)
    assert all(str(port) == variable for rank in said for _, port, variable in rank)
    return [[generation for generation, _, _ in rank] for rank in said], [
        [port for _, port, _ in rank] for rank in said
    ]


@pytest.mark.hostile
def test_survivors_and_newcomers_meet_at_a_new_port_each_time(local_ray):
    with RayVirtualCluster([2], use_gpus=False) as cluster, RayWorkerGroup(cluster, Listener) as group:
        ports = [group.master_port]
        lose(group, 1)
        assert group.restart_failed_workers() == [1]
        ports.append(group.master_port)
        assert heard(group) == ([[0, 1], [1]], [ports, ports[1:]])
        lose(group, 0)
        assert group.restart_failed_workers() == [0]
        ports.append(group.master_port)
        assert heard(group) == ([[2], [1, 2]], [ports[2:], ports[1:]])
        assert [group.renew_rendezvous(), group.renew_rendezvous()] == [3, 4]
        assert group.startup.slowest()["init"][1] == 0, "what was started last is still told"
        assert heard(group)[0] == [[2, 3, 4], [1, 2, 3, 4]]
        ports += heard(group)[1][0][1:]
        assert len(set(ports)) == 5
        assert group.restart_failed_workers() == []
        assert [info.generation for info in group.ranks] == [4, 4]


@pytest.mark.long  # in short, without Ray: test_the_dead_are_replaced_with_those_that_they_are_tied_to
@pytest.mark.hostile
def test_a_tied_group_is_replaced_as_one(local_ray):
    with (
        RayVirtualCluster([3], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Listener, bundle_indices_list=[[0, 1], [2]]) as group,
    ):
        before = group.call("pid").get_results()
        lose(group, 1)
        assert group.restart_failed_workers() == [0, 1]
        after = group.call("pid").get_results()
        assert [a == b for a, b in zip(after, before, strict=True)] == [False, False, True]
        assert heard(group)[0] == [[1], [1], [0, 1]]


@pytest.mark.hostile
def test_a_generation_that_a_rank_refuses_is_told_and_the_next_one_is_another(local_ray):
    with (
        RayVirtualCluster([1], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Listener, env_vars={"REFUSED": "1"}) as group,
    ):
        with pytest.raises(WorkerFailureError, match="generation 1 is not for rank 0") as refused:
            group.renew_rendezvous()
        assert (refused.value.rank, refused.value.method) == (0, "on_generation")
        assert group.renew_rendezvous() == 2
        assert heard(group)[0] == [[0, 1, 2]]


@pytest.mark.hostile
def test_a_group_that_has_no_port_to_spare_still_gets_new_generations(local_ray):
    # Who names no range is given other ports.
    with lease_ports(2, port_range=(7300, 7399), consecutive=True) as lease:
        ports = lease.ports
    with (
        RayVirtualCluster([1], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Worker, ports_per_worker=0, port_range=ports) as group,
    ):
        for generation in (1, 2, 3):
            before = group.master_port
            assert group.renew_rendezvous() == generation
            assert group.master_port in set(ports) - {before}
            seen = group.call("environment", "MASTER_PORT").get_results()
            assert seen == [{"MASTER_PORT": str(group.master_port)}]
            assert group.call("where").get_results()[0].generation == generation


def test_the_same_in_process(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "0")
    with InProcessGroup(FakeCluster([2]), Listener) as group:
        port = group.master_port
        assert group.renew_rendezvous() == 1
        said = group.call("get_heard").get_results()
        assert [rank[0][:2] for rank in said] == [(0, port)] * 2
        assert [rank[1][:2] for rank in said] == [(1, group.master_port)] * 2
        assert port != group.master_port
        monkeypatch.setenv("REFUSED", "2")
        with pytest.raises(WorkerFailureError, match="generation 2 is not for rank"):
            group.renew_rendezvous()


def test_a_start_fails_with_what_the_first_generation_raises(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setenv("REFUSED", "0")
    with pytest.raises(WorkerFailureError, match="generation 0 is not for rank"):
        InProcessGroup(FakeCluster([2]), Listener)


@pytest.mark.parametrize(("worker", "said"), [(GeneratorListener, "generator"), (DeafListener, "too many")])
def test_what_can_not_be_called_is_refused_before_anything_is_started(worker, said):
    with pytest.raises(TypeError, match=f"on_generation is called with the current worker.*{said}"):
        InProcessGroup(FakeCluster([1]), worker)


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("methods", "least", "held", "told"),
    [
        ({HOOK: None}, None, [0, 1], [0, 1]),
        ({}, None, [], []),
        ({HOOK: None}, 1, [], [0, 1]),
    ],
    ids=["all hear of it", "nobody hears of it", "all go on until they hear of it"],
)
def test_calls_wait_from_the_start_of_a_generation_that_workers_hear_of(
    monkeypatch, methods, least, held, told
):
    group = RayWorkerGroup.__new__(RayWorkerGroup)
    group._life = Lifecycle("policy", "open")
    group._claim = None
    group._spec = SimpleNamespace(options=SimpleNamespace(min_workers=least))
    group._crew = SimpleNamespace(end_strays=list, directory=Directory("policy"), reserve=Reserve())
    group._started = SimpleNamespace(
        info=SimpleNamespace(methods=methods), ranks=[SimpleNamespace(generation=1)] * 2
    )
    waiting = []

    def look():
        waiting.append([])
        for rank in range(2):
            try:
                group._life.await_replaced([rank], None)
            except WorkerGroupError:  # the restart itself would wait for its own end
                waiting[-1].append(rank)

    def build(*given):
        look()
        given[-1]()
        look()

    monkeypatch.setattr(renewal, "next_generation", build)
    monkeypatch.setattr(RayWorkerGroup, "_shown", lambda *_: nullcontext())
    assert group.renew_rendezvous() == 1
    assert waiting == [held, told]


def test_the_dead_are_replaced_with_those_that_they_are_tied_to(monkeypatch):
    group, expected, replaced = RayWorkerGroup.__new__(RayWorkerGroup), {}, []
    group._life, group._spec = Lifecycle("policy", "open"), SimpleNamespace(name="policy")
    group._tied_groups = [[0, 1], [2, 3], [4]]
    group._started = SimpleNamespace(facts=[SimpleNamespace(pid=10 + rank) for rank in range(5)])
    group._supervision = SimpleNamespace(expect=expected.update)
    monkeypatch.setattr(RayWorkerGroup, "_dead", lambda _: {1, 4})
    monkeypatch.setattr(RayWorkerGroup, "_next_generation", lambda _, ranks: replaced.append(ranks))
    assert group.restart_failed_workers() == [0, 1, 4]
    assert replaced == [[0, 1, 4]]
    assert expected == {0: group._started.facts[0]}, "the group ends it itself: no death to be told of"


@pytest.mark.hostile
@pytest.mark.parametrize(("pauses", "replaced"), [(True, [0, 1, 4]), (False, [4])])
def test_who_dies_in_the_pause_before_a_restart_is_replaced_by_the_same_one(monkeypatch, pauses, replaced):
    group, generations = RayWorkerGroup.__new__(RayWorkerGroup), []
    group._life, group._spec = Lifecycle("policy", "open"), SimpleNamespace(name="policy")
    group._tied_groups = [[0, 1], [4]]
    group._started = SimpleNamespace(facts=[SimpleNamespace(pid=10 + rank) for rank in range(5)])
    group._supervision = SimpleNamespace(expect=list)
    found = [{4}, {4, 1}]
    monkeypatch.setattr(RayWorkerGroup, "_dead", lambda _: found.pop(0))
    monkeypatch.setattr(RayWorkerGroup, "_next_generation", lambda _, ranks: generations.append(ranks))
    assert renewal.Replaceable(group).replace_dead(lambda: pauses) == replaced
    assert generations == [replaced]


@pytest.mark.parametrize(
    ("rank", "seen", "answer", "status"),
    [
        (0, Seen(is_alive=False), "busy", "dead"),
        (0, Seen(is_alive=True), "dead", "dead"),
        (0, Seen(is_alive=True), "ready", "ready"),
        (0, "its node does not answer", "busy", "busy"),
        (1, Seen(is_alive=True), "ready", "dead"),
    ],
)
def test_a_rank_is_dead_for_its_node_or_for_ray_or_is_no_more(monkeypatch, rank, seen, answer, status):
    group = RayWorkerGroup.__new__(RayWorkerGroup)
    monkeypatch.setattr(RayWorkerGroup, "_open", lambda _: None)
    monkeypatch.setattr(RayWorkerGroup, "_workers", lambda _: Workers(["facts"], ["handle"]))
    monkeypatch.setattr(RayWorkerGroup, "_sights", lambda *_: {0: seen})
    monkeypatch.setattr(RayWorkerGroup, "_answers", lambda *_: {0: answer})
    assert renewal.Replaceable(group).status(rank) == status


@pytest.mark.hostile
def test_a_group_that_was_shut_down_meanwhile_gets_no_new_workers(monkeypatch):
    life, made = Lifecycle("policy", "open"), []
    launch = generations._Succession.__new__(generations._Succession)
    options = SimpleNamespace(environments=None)
    launch.spec = SimpleNamespace(options=options, builder=SimpleNamespace(fqn="Policy"), cluster=None)
    launch.positions, launch.handles, launch.aliases, launch.deadline = [0], {}, {0: "policy"}, None
    launch.claim = SimpleNamespace(bundles=[])
    launch.go_on, launch._end = life.check, lambda: None
    life.close(lambda: True)
    monkeypatch.setattr(startup, "shell_class", lambda _: Listener)
    monkeypatch.setattr(startup, "start_actor", lambda *_: made.append("a worker"))
    worker = SimpleNamespace(actor={})
    with pytest.raises(WorkerGroupClosedError):
        launch.succeed(SimpleNamespace(order=[0], options=[worker], info=None), print)
    assert not made


@pytest.mark.hostile
def test_new_workers_that_their_group_can_not_take_in_are_ended():
    ended = []
    launch = generations._Succession.__new__(generations._Succession)
    launch._build = launch._tell_places = lambda *_: {}
    launch._end = lambda: ended.append("the new ones")

    def take(started):
        raise TimeoutError("nobody says how large a share of its bundle each has")

    with pytest.raises(TimeoutError):
        launch.succeed(None, take)
    assert ended == ["the new ones"]


@pytest.mark.parametrize(
    ("positions", "arrivals", "asked"),
    [
        ([], {}, 1),
        ([2], {}, 1),
        ([2], {2: None}, 1),
        ([1, 2], {1: STANDS_BY}, 1),
        ([2], {2: STANDS_BY}, 0),
    ],
)
def test_nodes_are_asked_for_an_environment_unless_all_who_come_stood_by(
    monkeypatch, positions, arrivals, asked
):
    environments = []
    options = SimpleNamespace(environments="them")
    spec = SimpleNamespace(
        options=options, builder=SimpleNamespace(fqn="Policy"), cluster=None, name="policy"
    )
    started = SimpleNamespace(order=range(3))
    launch = SimpleNamespace(met=lambda *_: None, succeed=lambda *_: None)
    monkeypatch.setattr(generations, "starting", lambda *_: nullcontext())
    monkeypatch.setattr(generations, "_end_old", lambda *_: None)
    monkeypatch.setattr(generations, "_Succession", lambda *_: launch)
    monkeypatch.setattr(generations, "interpreter_for", lambda *given: environments.append(given))
    generations.next_generation(spec, None, started, positions, arrivals, print, print, print)
    assert environments == [("them", "Policy", None)] * asked


@pytest.mark.parametrize(
    ("known", "told", "port", "asked"),
    [
        (4711, {}, 4711, []),
        ("a call", {0: 4712}, 4712, ["a call"]),
        ("a call", {0: 0}, 4713, ["a call", "rank 0"]),
        (None, {}, 4713, ["rank 0"]),
    ],
    ids=["it is known", "it was asked for", "there was none", "nobody has asked"],
)
def test_rank_0_is_asked_where_to_meet_only_if_that_is_not_known(monkeypatch, known, told, port, asked):
    calls = []
    handles = [
        SimpleNamespace(_raycrew_next_port=SimpleNamespace(remote=lambda i=i: f"rank {i}")) for i in (0, 1)
    ]
    ranks = [SimpleNamespace(generation=3)] * 2
    launch = generations._Succession.__new__(generations._Succession)
    launch.spec, launch.go_on = SimpleNamespace(name="policy"), print

    def settle(asked):
        calls.extend(asked)
        return SimpleNamespace(values={0: 4713} if asked == ["rank 0"] else told, pending=())

    monkeypatch.setattr(generations, "Whereabouts", lambda *_: None)
    monkeypatch.setattr(generations, "while_connected", nullcontext)
    launch._settle, launch._raise_failed = settle, lambda *_: None
    started = SimpleNamespace(spare_port=known, handles=handles, ranks=ranks, facts=[None] * 2)
    assert (launch._spare_port(started), calls) == (port, asked)


def test_a_rank_0_that_does_not_tell_in_time_fails_the_generation(monkeypatch):
    launch = generations._Succession.__new__(generations._Succession)
    launch.spec = SimpleNamespace(name="policy")
    launch._settle = lambda asked: SimpleNamespace(values={}, pending=(0,))
    monkeypatch.setattr(generations, "Whereabouts", lambda *_: None)

    def fail(told, places, method):
        raise WorkerGroupError(f"{method} has not ended")

    launch._raise_failed = fail
    started = SimpleNamespace(spare_port="a call", ranks=[SimpleNamespace(generation=3)], facts=[None])
    with pytest.raises(WorkerGroupError, match="the call before generation 3 has not ended"):
        launch._spare_port(started)


@pytest.mark.parametrize(
    ("has_hook", "told", "port"),
    [
        (False, {0: "its answer", 1: "another"}, "its answer"),
        (False, {1: "another"}, 4711),
        (True, {0: "x"}, None),
    ],
    ids=["rank 0 lives", "rank 0 is new", "rank 0 takes its place later"],
)
def test_what_rank_0_answers_is_where_the_next_generation_meets(has_hook, told, port):
    """Where its class hears of generations, its answer is of before it took its place."""
    launch, steps = generations._Succession.__new__(generations._Succession), []
    successor = SimpleNamespace(spare_port=4711, info=None)
    launch._build = lambda started: successor
    launch._has_hook = lambda info: has_hook
    launch._tell_places = lambda _: steps.append("told") or told
    launch._await_places = lambda _, told: steps.append(f"awaited {sorted(told)}")
    launch.succeed(None, lambda _: steps.append("built"), lambda: steps.append("before"))
    assert successor.spare_port == port
    assert steps == ["before", "told", "built", f"awaited {sorted(told)}"]


def test_survivors_are_told_at_once_unless_their_class_hears_of_it(monkeypatch):
    handles = [
        SimpleNamespace(__ray_ready__=SimpleNamespace(remote=lambda i=i: f"ready {i}")) for i in range(3)
    ]
    launch = generations._Succession.__new__(generations._Succession)
    launch.orders, launch.go_on = {0: "first", 2: "third"}, print
    launch._prepare = lambda handle, orders: f"told {orders}"
    monkeypatch.setattr(generations, "while_connected", nullcontext)
    started = SimpleNamespace(handles=handles, info=None)
    for has_hook, told in ((False, {0: "told first", 2: "told third"}), (True, {0: "ready 0", 2: "ready 2"})):
        launch._has_hook = lambda _, has_hook=has_hook: has_hook
        assert launch._tell_places(started) == told


def facts_of(position, pid=0):
    port = 9000 + 10 * position + pid
    return WorkerFacts("node", "127.0.0.1", pid or position, master_port=port, spare_port=port + 5)


def built(positions, n):
    """Rank 0 is at position 2, rank 1 at 0, rank 2 at 1; the workers of some positions are new."""
    launch = generations._Succession.__new__(generations._Succession)
    launch.spec = SimpleNamespace(name="policy", options=SimpleNamespace(env_vars=None, init=None))
    launch.claim, launch.report = FakeCluster([n]).claim(None, "policy"), "a new report"
    launch.positions, launch.handles, launch.names, begun = positions, {}, {}, []

    def create(info, options):
        launch.handles = {position: f"new {position}" for position in positions}
        launch.names = {position: f"name of new {position}" for position in positions}

    launch._create = create
    launch._locate = lambda: {position: facts_of(position, pid=7) for position in positions}
    launch._begin = lambda order, ranks, facts, own: begun.append([own[p] for p in positions])
    launch._orders = lambda info, facts, own: (info.rank, info.generation, facts.pid, own)
    launch._note_phases = lambda *_: None
    order, facts = [2, 0, 1], [facts_of(position) for position in range(3)]
    started = startup.Started(
        [f"old {position}" for position in order],
        assign_ranks(order, facts, [0, 1, 2], "policy", 3),
        [facts[position] for position in order],
        order,
        SimpleNamespace(configured=[None] * n),
        [f"told to {position}" for position in range(n)],
        "the report of the start",
        4711,
        [f"name of old {position}" for position in order],
    )
    return launch._build(started), launch, begun


@pytest.mark.parametrize(
    ("positions", "handles", "port", "spare", "report"),
    [
        ([0], ["old 2", "new 0", "old 1"], 4711, 9025, "a new report"),
        ([2], ["new 2", "old 0", "old 1"], 9027, 9032, "a new report"),
        ([], ["old 2", "old 0", "old 1"], 4711, 9025, "the report of the start"),
        ([3], ["old 2", "old 0", "old 1", "new 3"], 4711, 9025, "a new report"),
    ],
    ids=["one was replaced", "rank 0 was", "nobody was", "one came"],
)
def test_a_generation_has_the_ranks_that_it_had_and_those_that_come_after_them(
    positions, handles, port, spare, report
):
    found, launch, begun = built(positions, len(handles))
    assert (found.handles, found.names) == (handles, [f"name of {handle}" for handle in handles])
    assert [info.rank for info in found.ranks] == list(range(len(handles)))
    assert {(info.world_size, info.generation, info.master_port) for info in found.ranks} == {
        (len(handles), 4, port)
    }
    assert found.order == [2, 0, 1, 3][: len(handles)]
    assert [info.bundle_index for info in found.ranks] == found.order
    assert [facts.pid for facts in found.facts] == [7 if p in positions else p for p in found.order]
    assert (found.report, found.spare_port) == (report, spare)
    assert begun == [[f"told to {position}" for position in positions]]
    told = {r: (r, 4, p, f"told to {p}") for r, p in enumerate(found.order) if p not in positions}
    assert launch.orders == told, "those that live are told by themselves"


@pytest.mark.parametrize(
    ("has_hook", "told", "settled", "port"),
    [
        (False, {0: "a"}, [], 4711),
        (True, {0: "a", 2: "c"}, ["a", "c"], "asked"),
        (True, {2: "c"}, ["c"], 4711),
    ],
    ids=["nobody hears of it", "all hear", "rank 0 is new"],
)
def test_all_hear_of_a_generation_once_those_that_live_are_there(monkeypatch, has_hook, told, settled, port):
    launch, steps = generations._Succession.__new__(generations._Succession), []
    launch.spec, launch.orders = SimpleNamespace(name="policy"), {0: "first"}
    launch._has_hook = lambda _: has_hook
    launch._settle = lambda calls: steps.extend(calls)
    launch._raise_failed = lambda settled, places, method: steps.append((len(places), method))
    launch._tell = lambda info, handles, ranks, facts, orders: steps.append(orders)
    launch._next_port = lambda _: "asked"
    monkeypatch.setattr(generations, "Whereabouts", lambda *_: None)
    started = SimpleNamespace(info=None, handles=[], ranks=[None] * 3, facts=[None] * 3, spare_port=4711)
    launch._await_places(started, told)
    heard = [*settled, (len(told), "the call before the new generation"), {0: "first"}]
    assert steps == (heard if has_hook else [])
    assert started.spare_port == port


@pytest.mark.parametrize("is_gone", [True, False])
def test_nobody_is_replaced_whose_process_is_still_there(monkeypatch, is_gone):
    ended, launched = [], []
    spec = SimpleNamespace(
        name="policy",
        options=SimpleNamespace(environments=None),
        builder=SimpleNamespace(fqn=""),
        cluster=None,
    )
    started = SimpleNamespace(order=[2, 0, 1], handles="abc", facts="xyz")

    def end(handles, facts):
        ended.append((handles, facts))
        return SimpleNamespace(occupied=not is_gone, left={} if is_gone else {1: "it hangs", 2: "it waits"})

    launch = SimpleNamespace(met=lambda *_: None, succeed=lambda *_: None)
    monkeypatch.setattr(generations, "starting", lambda *_: nullcontext())
    monkeypatch.setattr(generations, "end_workers", end)
    monkeypatch.setattr(generations, "interpreter_for", lambda *_: None)
    monkeypatch.setattr(generations, "_Succession", lambda *given: launched.append(given[3]) or launch)
    given = (spec, None, started, [1, 2], {}, print, print, print)
    if is_gone:
        generations.next_generation(*given)
    else:
        with pytest.raises(WorkerGroupError, match=r"ended \(rank 1: it hangs; rank 2: it waits\)"):
            generations.next_generation(*given)
    assert ended == [({1: "b", 2: "c"}, {1: "y", 2: "z"})]
    assert launched == ([[0, 1]] if is_gone else []), "their positions"


def test_further_workers_are_started_at_the_positions_after_those_that_there_are(monkeypatch):
    asked = []
    launch = SimpleNamespace(
        prepared=lambda started, positions: asked.append(list(positions)) or "prepared",
        succeed=lambda *given: asked.append(given),
    )
    monkeypatch.setattr(generations, "starting", lambda spec, n: asked.append(n) or nullcontext())
    monkeypatch.setattr(generations, "_Succession", lambda *given: asked.append(list(given[3])) or launch)
    spec, started = SimpleNamespace(plan=SimpleNamespace(seats=[None] * 5)), SimpleNamespace(order=[2, 0, 1])
    generations.add_workers((spec, None, started), "end", "go on", "before", "built")
    assert asked == [2, [3, 4], [3, 4], ("prepared", "built", "before")]
