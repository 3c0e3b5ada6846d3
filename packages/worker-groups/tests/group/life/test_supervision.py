import asyncio
import gc
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import ray
from patience import PATIENCE_S, eventually
from workers import Marker, Mortal, SlowMortal

from raycrew.cluster_core import RayVirtualCluster
from raycrew.worker_groups import RayWorkerGroup, WorkerFailureError, wait_any
from raycrew.worker_groups._calls import Whereabouts, failure
from raycrew.worker_groups._group.life import Lifecycle, supervision
from raycrew.worker_groups._group.life.supervision import Supervision
from raycrew.worker_groups.sharding import WorkerFacts

pytestmark = pytest.mark.hostile


@pytest.mark.parametrize(
    "take",
    [
        lambda group, pids: group.call("meet", pids, 1).get_results(),
        pytest.param(
            lambda group, pids: list(group.call("meet", pids, 1).as_completed()), marks=pytest.mark.long
        ),
        pytest.param(lambda group, pids: list(group.stream("stream", pids, 1)), marks=pytest.mark.long),
    ],
    ids=["get", "as_completed", "stream"],
)
def test_the_culprit_comes_first_however_late_its_death_is_known(local_ray, take):
    with RayVirtualCluster([2], use_gpus=False) as cluster, RayWorkerGroup(cluster, Mortal) as group:
        pids = group.call("pid").get_results()
        with pytest.raises(WorkerFailureError, match=r"rank 1 .* died during") as failed:
            take(group, pids)
        assert failed.value.rank == 1
        if failed.value.pending != (0,):
            assert [part.rank for part in failed.value.exceptions] == [1, 0]
            assert isinstance(failed.value.exceptions[1].cause, ConnectionError)
        assert group.restart_failed_workers() == [1]


def test_a_group_restarts_itself_and_only_idempotent_calls_go_again(local_ray, tmp_path):
    told = []
    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster,
            Mortal,
            idempotent_methods=("die_once",),
            restart_on_failure=True,
            max_restarts=3,
            on_worker_failure=lambda failure: told.append((failure.rank, group.generation)),
        ) as group,
    ):
        again = group.call("die_once", str(tmp_path / "first"), 1)
        assert again.get_results() == again.get_results() == [(0, 1), (1, 1)]
        assert told == [(1, 0)]
        completed = group.call("die_once", str(tmp_path / "second"), 0).as_completed()
        assert sorted(completed) in ([(0, (0, 2)), (1, (1, 1))], [(0, (0, 2)), (1, (1, 2))])
        never = group.call("die_on", 1)
        with pytest.raises(WorkerFailureError, match="died during die_on") as failed:
            never.get_results()
        assert "not declared idempotent" in failed.value.__notes__[0]
        assert (told, group.generation) == ([(1, 0), (0, 1), (1, 2)], 3)
        assert group.call("die_once", str(tmp_path / "first"), 1).get_results() == [(0, 3), (1, 3)]
        with pytest.raises(WorkerFailureError, match="died during die_on"):
            never.get_results()  # of a process that has a successor: no news
        assert (len(told), group.generation) == (3, 3)
        with pytest.raises(WorkerFailureError) as spent:
            group.call("die_on", 0).get_results()
        assert "all 3 restarts of max_restarts are used up" in spent.value.__notes__[0]
        assert (len(told), group.generation) == (4, 3)
        assert group.restart_failed_workers() == [0]


def test_a_stream_is_not_begun_again_and_raises_once_the_group_is_whole(local_ray, tmp_path):
    told = []
    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster,
            Mortal,
            idempotent_methods=("stream_and_die_once",),
            restart_on_failure=True,
            on_worker_failure=lambda failure: told.append(failure.rank),
        ) as group,
    ):
        items = []
        with pytest.raises(WorkerFailureError, match="died during stream_and_die_once") as failed:
            for item in group.stream("stream_and_die_once", str(tmp_path / "marker"), 1):
                items.append(item)  # noqa: PERF402 - what came before it raised is kept
        assert failed.value.rank == 1
        assert len(items) == len(set(items)) and set(items) <= {(0, 0), (0, 1), (0, 2), (1, 0)}
        assert (told, group.generation) == ([1], 1)
        again = sorted(group.stream("stream_and_die_once", str(tmp_path / "marker"), 1))
        assert again == [(rank, item) for rank in range(2) for item in range(3)]


def test_calls_that_are_sent_again_have_not_ended(local_ray, tmp_path):
    told = []
    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster, Mortal, idempotent_methods=("die_once",), restart_on_failure=True, max_restarts=2
        ) as group,
    ):
        marker = Marker(tmp_path / "first")
        kept = weakref.ref(marker)
        first = group.call("die_once", marker, 1)
        first.add_done_callback(lambda future: told.append((group.generation, future.get_results(timeout=1))))
        assert wait_any([first], timeout=PATIENCE_S) == [first]
        assert (first.done(), group.generation, first.get_results(timeout=1)) == (True, 1, [(0, 1), (1, 1)])
        eventually(lambda: told == [(1, [(0, 1), (1, 1)])], "the callback is called")
        del marker
        eventually(lambda: gc.collect() >= 0 and kept() is None, "what will not be sent again is not kept")
        second = group.call("die_once", str(tmp_path / "second"), 0)
        eventually(second.done, "who asks again and again is told in the end")
        assert (group.generation, second.get_results(timeout=1)) == (2, [(0, 2), (1, 2)])
        third = group.call("die_once", str(tmp_path / "third"), 0)
        assert third.wait(PATIENCE_S)
        for _ in range(2):
            with pytest.raises(WorkerFailureError, match=r"rank 0 .*die_once") as spent:
                third.get_results(timeout=PATIENCE_S)
            assert "all 2 restarts of max_restarts are used up" in spent.value.__notes__[0]
        assert group.generation == 2


def test_who_asks_whether_calls_have_ended_loads_no_large_result(local_ray, tmp_path):
    loaded = tmp_path / "loaded"
    loaded.mkdir()
    with (
        RayVirtualCluster([2], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster,
            Mortal,
            idempotent_methods=("die_or_note",),
            restart_on_failure=True,
            max_restarts=1,
            enable_load_balancing=True,
        ) as group,
    ):
        arguments = str(tmp_path / "marker"), 1, str(loaded)
        future = group.call("die_or_note", *arguments)
        assert future.wait(PATIENCE_S)
        assert (future.done(), wait_any([future]), group.generation) == (True, [future], 1)
        single = group.balancer.call("die_or_note", *arguments)
        assert single.wait(PATIENCE_S)
        assert group.balancer.call("die_or_note", *arguments).wait(
            PATIENCE_S
        )  # looks what became of the other
        assert list(loaded.iterdir()) == []
        assert [noted.folder for noted in future.get_results()] == [str(loaded)] * 2
        assert [path.name for path in loaded.iterdir()] == [str(os.getpid())]


def test_what_is_raised_when_new_workers_arguments_are_asked_for_is_noted_on_the_calls_failure(
    local_ray, caplog
):
    arguments = {0: {}}
    with (
        RayVirtualCluster([1], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster, Mortal, init=lambda rank: arguments[rank.rank], restart_on_failure=True, max_restarts=1
        ) as group,
    ):
        del arguments[0]
        with pytest.raises(WorkerFailureError, match="died during die_on") as failed:
            group.call("die_on", 0).get_results()
        (note,) = failed.value.__notes__
        assert note == "its group was not restarted: KeyError: 0 (while init was asked for rank 0)"
        assert "Mortal was not restarted" in caplog.text


def test_a_task_that_gives_up_leaves_the_restart_to_others(local_ray, tmp_path):
    gate, begun = tmp_path / "gate", tmp_path / "begun"

    async def run(group):
        marker = str(tmp_path / "marker")
        first, second = group.call("die_once", marker, 0), group.call("die_once", marker, 0)
        waiting = [asyncio.create_task(_results(future)) for future in (first, second)]
        await asyncio.to_thread(eventually, begun.exists, "the new worker is in its __init__")
        waiting[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        gate.touch()
        return await waiting[1]

    async def _results(future):
        return await future

    with (
        RayVirtualCluster([1], use_gpus=False) as cluster,
        RayWorkerGroup(
            cluster,
            SlowMortal,
            begun=str(begun),
            gate=str(gate),
            idempotent_methods=("die_once",),
            restart_on_failure=True,
            max_restarts=1,
        ) as group,
    ):
        assert asyncio.run(run(group)) == [(0, 1)]


class Options:
    restart_on_failure = True
    n_restarts = 3
    idempotent_methods = ()

    def __init__(self, on_worker_failure=None):
        self.on_worker_failure = on_worker_failure


class Replaced:
    """A group of one rank whose restarts fail as they are told to."""

    def __init__(self, *outcomes):
        self.outcomes, self.asked, self.pid, self.node_id = list(outcomes), [], 1, "a"
        self.statuses, self.is_torn = [], False

    def status(self, rank):
        return self.statuses.pop(0)

    def replace_dead(self, before):
        self.asked.append(self.is_torn)
        outcome = self.outcomes.pop(0)
        if outcome == "nobody is dead":
            return []
        before()
        if outcome != "not told":
            self.pid += 1
        self.is_torn = outcome is not None
        if outcome is not None:
            raise WorkerFailureError(f"{outcome}, as it was told to")
        return [0]

    def is_present(self, rank, node_id, pid):
        return (node_id, pid) == (self.node_id, self.pid)

    def goes_on_without(self, ranks):
        return False


class GoesOn(Replaced):
    """One that goes on without its dead worker, of which it is whole once it may be."""

    def __init__(self, *outcomes):
        super().__init__(*outcomes)
        self.absent, self.may_end = set(), threading.Event()

    def replace_dead(self, before):
        before()
        self.absent = {0}
        assert self.may_end.wait(60)
        found = super().replace_dead(list)
        self.absent = set()
        return found

    def goes_on_without(self, ranks):
        return True

    def is_without(self, ranks):
        return self.absent.issuperset(ranks)


@pytest.fixture
def died():
    return WorkerFailureError("it died", rank=0, node_id="a", pid=1, cause=ray.exceptions.ActorDiedError())


@pytest.fixture
def life(monkeypatch):
    made = Lifecycle("policy")
    made.opened()
    monkeypatch.setattr(made, "pause", lambda seconds: None)
    return made


def test_a_restart_that_fails_is_tried_again_until_all_have_heard(life, died):
    group = Replaced("not told", "refused", None)
    assert Supervision("policy", Options(), life)._after(group, died)
    assert group.asked == [False, True, True]


def test_a_process_of_the_same_number_on_another_node_is_another_one(life, died):
    class Moving(Replaced):
        def replace_dead(self, before):
            found = super().replace_dead(before)
            self.pid, self.node_id = 1, "b"
            return found

    told, group = [], Moving(None)
    own = Supervision("policy", Options(lambda failure: told.append(failure.node_id)), life)
    assert own._after(group, died)
    assert group.asked == [False]
    own.expect({0: WorkerFacts("c", "10.0.0.1", 1)})
    for node_id in "abc":
        own._tell(WorkerFailureError("it died", rank=0, node_id=node_id, pid=1))
    assert told == ["a", "b"]


def test_a_group_that_another_thread_has_made_whole_gets_no_further_generation(life, died):
    class MadeWhole(Replaced):
        def replace_dead(self, before):
            try:
                return super().replace_dead(before)
            finally:
                self.is_torn = False  # by whoever was told of the same failure, and was quicker

    group = MadeWhole("refused", None)
    assert Supervision("policy", Options(), life)._after(group, died)
    assert group.asked == [False]


def test_and_no_more_often_than_may_be(life, died):
    group = Replaced("not told", "not told", "not told", None)
    assert not Supervision("policy", Options(), life)._after(group, died)
    assert len(group.asked) == 4
    assert died.__notes__ == ["its group was not restarted: all 3 restarts of max_restarts are used up"]


def test_nor_is_it_restarted_when_something_else_is_raised(life, died, caplog):
    class Raising(Replaced):
        def replace_dead(self, before):
            raise KeyError("shard")

    assert not Supervision("policy", Options(), life)._after(Raising(), died)
    assert died.__notes__ == ["its group was not restarted: KeyError: 'shard'"]
    assert "policy was not restarted" in caplog.text


def test_what_the_drivers_own_function_raises_is_logged(life, died, caplog):
    def fail(failure):
        raise ValueError(f"no ear for rank {failure.rank}")

    assert Supervision("policy", Options(fail), life)._after(Replaced(None), died)
    assert "no ear for rank 0" in caplog.text
    assert supervision.logger.name in {record.name for record in caplog.records}


def recovery_of(supervision, group, *, is_idempotent):
    supervision._options.idempotent_methods = ["step"] if is_idempotent else []
    method = SimpleNamespace(name="step", kind="sync")
    return supervision.recovery(method, group, lambda: "sent again")


def test_a_group_that_goes_on_is_not_waited_for_by_what_is_not_sent_again(life, died):
    group, supervision = GoesOn(None), Supervision("policy", Options(), life)
    recovery = recovery_of(supervision, group, is_idempotent=False)
    assert recovery.after(died, lambda: True) is None
    assert (group.absent, group.pid) == ({0}, 1), "it is without its worker by now"
    assert died.__notes__ == ["its group goes on without rank 0, which is being replaced"]
    assert recovery.after(died, lambda: True) is None
    group.may_end.set()
    eventually(lambda: group.pid == 2, "it is whole again")
    assert supervision._budget.used == 1, "however many were told of it"


def test_what_is_sent_again_waits_unless_its_sender_sees_to_it(life, died):
    group, supervision = GoesOn(None), Supervision("policy", Options(), life)
    recovery = recovery_of(supervision, group, is_idempotent=True)
    assert recovery.handed_over().after(died, lambda: True) is None
    assert not recovery.handed_over().sends_again
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(recovery.after, died, lambda: True)
        group.outcomes.append(None)
        group.may_end.set()
        assert waits.result(60) == "sent again"
    assert group.pid >= 2


def test_a_group_that_can_not_be_restarted_does_not_go_on(life, died):
    group, supervision = GoesOn(), Supervision("policy", Options(), life)
    supervision._budget.most = 0
    assert recovery_of(supervision, group, is_idempotent=False).after(died, lambda: True) is None
    assert died.__notes__ == ["its group was not restarted: all 0 restarts of max_restarts are used up"]


def test_nothing_is_done_for_a_group_that_is_shut_down(life, died):
    life.close(lambda: True)
    told = []
    assert not Supervision("policy", Options(told.append), life)._after(Replaced(), died)
    assert not told


@pytest.fixture
def out_of_reach():
    gone = ray.exceptions.ActorUnavailableError("out of reach", None)
    return WorkerFailureError("it is out of reach", rank=0, node_id="a", pid=1, cause=gone)


def test_a_worker_that_is_out_of_reach_for_a_moment_has_not_died(life, died, out_of_reach):
    told, group = [], Replaced(None)
    supervision = Supervision("policy", Options(told.append), life)
    group.statuses = ["busy", "ready"]
    assert not supervision._after(group, out_of_reach)
    assert (told, group.asked, group.statuses) == ([], [], [])
    assert out_of_reach.__notes__ == ["rank 0 could not be reached, but has not died as far as is known"]
    assert supervision._after(group, died)  # now it has
    assert told == [died]
    assert group.asked == [False]


def test_so_the_failure_says(out_of_reach):
    said = str(failure(Whereabouts("policy", seat="rank 0"), out_of_reach.cause, "step"))
    assert "could not be reached during step" in said
    assert said.endswith("restart_failed_workers() of its group replaces it, if it has died")


def test_one_that_then_turns_out_to_be_dead_is_told_and_replaced(life, out_of_reach):
    told, group = [], Replaced(None)
    group.statuses = ["busy", "busy", "dead"]
    assert Supervision("policy", Options(told.append), life)._after(group, out_of_reach)
    assert told == [out_of_reach]
    assert group.asked == [False]


def test_one_that_stays_out_of_reach_is_left_alone(life, out_of_reach, monkeypatch):
    monkeypatch.setattr(supervision, "DOUBT_S", 0.0)
    told, group = [], Replaced()
    group.statuses = ["busy"]
    assert not Supervision("policy", Options(told.append), life)._after(group, out_of_reach)
    assert not told
    assert "has not died as far as is known" in out_of_reach.__notes__[0]


def test_a_death_that_ray_does_not_tell_yet_is_looked_for_again(life, died):
    group = Replaced("nobody is dead", "nobody is dead", None)
    assert Supervision("policy", Options(), life)._after(group, died)
    assert group.asked == [False] * 3


def test_and_a_note_says_so_when_it_never_does(life, died, monkeypatch):
    monkeypatch.setattr(supervision, "DOUBT_S", 0.0)
    assert not Supervision("policy", Options(), life)._after(Replaced("nobody is dead"), died)
    assert "Ray still does not say that its worker is dead" in died.__notes__[0]


def test_between_restarts_there_is_a_longer_and_longer_pause(died, monkeypatch):
    paused, life = [], Lifecycle("policy")
    life.opened()
    monkeypatch.setattr(life, "pause", paused.append)
    assert Supervision("policy", Options(), life)._after(Replaced("not told", "not told", None), died)
    assert paused == pytest.approx([0, 1, 3], abs=0.5)  # counted from now: none of them is waited here


@pytest.mark.parametrize(("used", "has_paused"), [(0, False), (1, True)])
def test_a_restart_hears_whether_it_was_paused_before(life, used, has_paused):
    made = Supervision("policy", Options(), life)
    for _ in range(used):
        made._await_turn()
    assert made._await_turn() is has_paused


def test_a_process_that_can_have_no_more_threads_still_restarts_its_group(life, died, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    group = GoesOn(None)
    group.may_end.set()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert not Supervision("policy", Options(), life)._after(group, died, in_passing=True)
    assert (group.pid, group.absent) == (2, set())
