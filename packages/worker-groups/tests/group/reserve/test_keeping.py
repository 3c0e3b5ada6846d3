"""Spare bundles and those who stand by on them, without Ray: taken, given back, prepared and ended."""

import threading
from types import SimpleNamespace

import pytest
from patience import eventually
from ray.exceptions import GetTimeoutError
from test_choosing import made

from raycrew.cluster_core import NodeLostError
from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import WorkerGroupClosedError
from raycrew.worker_groups._group.reserve import Reserve, keeping
from raycrew.worker_groups._health import Ended
from raycrew.worker_groups._start import JoinedClaim, Standby

pytestmark = pytest.mark.hostile


class World:
    """What Ray says: which nodes live, how those are who stand by, and what becomes of a preparation."""

    def __init__(self, monkeypatch):
        self.nodes, self.states, self.ended = ["0", "1"], {}, []
        self.prepared, self.goes_on = 0, threading.Event()
        self.goes_on.set()
        self.occupied = False
        self.failures = 0
        monkeypatch.setattr(keeping, "living_nodes", lambda: [{"NodeID": f"{n:0>56}"} for n in self.nodes])
        monkeypatch.setattr(keeping, "actor_states", self.look)
        monkeypatch.setattr(keeping, "end_workers_of", self.end)
        monkeypatch.setattr(keeping, "park", self.park)
        monkeypatch.setattr(keeping, "check_session", lambda *_: None)

    def look(self, handles, _):
        return {i: self.states.get(handle, "ready") for i, handle in enumerate(handles)}

    def end(self, _, handles, __):
        self.ended += handles.values()
        left = dict.fromkeys(handles, "it lingers") if self.occupied else {}
        return Ended(left=left, occupied=self.occupied, again=Ended)  # it has ended at the next look

    def park(self, _, places, on_end, go_on):
        standbys = []
        if self.failures:
            self.failures -= 1
            raise TimeoutError("Ray does not answer")
        for place in places.values():
            self.prepared += 1
            handle, facts = f"standby {self.prepared}", SimpleNamespace(pid=self.prepared)
            standbys.append(Standby(place, handle, handle, facts, None, None))
        try:
            while not self.goes_on.wait(0.01):
                go_on()
        except WorkerGroupClosedError:
            on_end(Ended())
            raise
        return standbys


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def reserved(n_spare, n_standbys, counts=(3, 2)):
    """Ranks on bundles 0 and 3; their spare bundles, of 1, 2 and 4."""
    layout, places = made(FakeCluster(counts), workers_per_node=1, n_spare=n_spare)
    layout = layout._replace(started=SimpleNamespace(order=[0, 1]))
    kept = Reserve("g", "session", list(places.values()), n_standbys)
    kept.prepare(layout)
    return layout, kept


def shown(kept):
    return {spare.bundle_index: spare.pid for spare in kept.spares}


def preparing():
    """The threads that have somebody stand by, or try again to."""
    return [thread for thread in threading.enumerate() if thread.name == "raycrew-standby"]


def holders(layout):
    return sorted(layout.spec.cluster.holders())


def test_what_a_rank_leaves_behind_is_the_next_spare_bundle(world):
    layout, kept = reserved(2, 1)
    assert shown(kept) == {1: 1, 2: None}
    with kept.moving(layout, [0]) as move:
        assert [bundle.index for bundle in move.layout.claim.bundles] == [1, 3]
        assert (move.arrivals[0].handle, shown(kept)) == ("standby 1", {2: None})
        move.is_made = True
    assert shown(kept) == {0: None, 2: None}
    told = []
    kept.on_change = lambda: told.append(shown(kept))
    kept.replenish(move.layout)
    eventually(lambda: told == [{0: None, 2: 2}], "somebody stands by again")
    kept.replenish(move.layout)
    assert (kept.end(2), world.ended, holders(layout)) == (Ended(), ["standby 2"], [1, 3])
    assert kept.end(2) == Ended()


def test_what_fails_leaves_everything_as_it_was_and_who_has_died_of_it_is_not_taken_again(world):
    layout, kept = reserved(1, 1)

    def fail():
        with kept.moving(layout, [0]):
            raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        fail()
    assert (shown(kept), holders(layout)) == ({1: 1}, [0, 1, 3])
    world.states["standby 1"] = "dead"
    with kept.moving(layout, [0]) as move:
        assert (move.layout, move.arrivals) == (layout, {})
    assert (world.ended, shown(kept)) == (["standby 1"], {1: None})


def test_who_is_found_dead_stands_by_no_more_unless_it_takes_over_meanwhile(world):
    layout, kept = reserved(2, 2)
    first, second = kept.standbys
    with kept.moving(layout, [0]) as move:
        assert move.arrivals == {0: first}
        kept.part_with([first, second])
        assert (world.ended, shown(kept)) == (["standby 2"], {2: None})
        move.is_made = True
    kept.part_with([second])
    kept.replenish(move.layout)
    eventually(lambda: sorted(map(str, shown(kept).values())) == ["3", "4"], "two stand by again")
    assert world.ended == ["standby 2"]


@pytest.mark.parametrize("outcome", ["ended", "occupied", "raised", "over"])
def test_nobody_comes_to_a_bundle_before_who_stood_by_there_has_ended(world, monkeypatch, outcome):
    layout, kept = reserved(1, 1)
    (standby,), seen, end = kept.standbys, [], world.end
    world.occupied = outcome == "occupied"

    def look(*given):
        kept.replenish(layout)
        seen.append((shown(kept), kept._free, world.prepared))
        if outcome == "over":
            kept.end(2)
        if outcome == "raised":
            raise WorkerGroupClosedError("the connection has ended")
        return end(*given)

    monkeypatch.setattr(keeping, "end_workers_of", look)
    if outcome == "raised":
        with pytest.raises(WorkerGroupClosedError):
            kept.part_with([standby])
    else:
        kept.part_with([standby])
    assert seen == [({}, {}, 1)]
    left = {"ended": ({1: None}, [0, 1, 3]), "over": ({}, [0, 3])}.get(outcome, ({}, [0, 1, 3]))
    assert (shown(kept), holders(layout)) == left


def test_a_bundle_whose_standby_can_not_be_ended_is_no_spare_one_any_more(world):
    layout, kept = reserved(2, 1)
    world.states["standby 1"], world.occupied = "busy", True
    with kept.moving(layout, [0, 1]) as move:
        assert move.arrivals == {}
    assert (shown(kept), holders(layout)) == ({2: None}, [0, 1, 2, 3])


def test_nobody_moves_without_ranks_and_nothing_is_asked(world):
    layout, kept = reserved(1, 1)
    world.nodes = None
    with kept.moving(layout, []) as move:
        assert move.layout is layout


def test_ranks_of_a_lost_node_need_bundles_and_what_is_lost_is_nobodys(world, caplog):
    layout, kept = reserved(3, 0)
    world.nodes = ["0"]
    with kept.moving(layout, [1]) as move:
        assert (list(move.places), move.arrivals, shown(kept)) == ([1], {1: None}, {2: None})
        assert holders(layout) == [0, 1, 2], "3 and 4 are gone"
        assert "g: rank 1 moves to spare bundle 1 on another node, " in caplog.text
        move.is_made = True
    assert shown(kept) == {2: None}


def test_while_it_is_not_known_which_nodes_live_who_answers_takes_over(world, monkeypatch, caplog):
    layout, kept = reserved(2, 2)

    def deaf():
        raise GetTimeoutError("the control service does not answer")

    monkeypatch.setattr(keeping, "living_nodes", deaf)
    world.states["standby 2"] = "dead"
    with kept.moving(layout, [0, 1]) as move:
        taken = [standby.handle for standby in move.arrivals.values()]
        assert (taken, list(move.lost)) == (["standby 1"], [])
    assert "g: which nodes live is not known at the moment: the control service" in caplog.text
    assert shown(kept) == {1: 1, 2: None}


def test_lost_bundles_that_can_not_be_given_back_lose_nobody_who_stands_by(world, monkeypatch):
    layout, kept = reserved(2, 1)
    world.nodes = ["0"]

    def deaf(_):
        raise TimeoutError("who keeps the bundles does not answer")

    monkeypatch.setattr(JoinedClaim, "release", deaf)
    with pytest.raises(TimeoutError), kept.moving(layout, [1]):
        pass
    assert shown(kept) == {1: 1, 2: None}


def test_too_few_bundles_are_an_error_that_changes_nothing(world):
    layout, kept = reserved(1, 1)
    world.nodes = []
    with pytest.raises(NodeLostError, match=r"bundles of ranks \[0, 1\].*\(it has 0\); spare_bundles= keeps"):
        kept.moving(layout, [0, 1]).__enter__()
    assert holders(layout) == [0, 3]


def test_a_preparation_is_given_up_for_a_lost_rank_and_not_for_others(world):
    layout, kept = reserved(1, 0)
    kept._n_standbys = 1
    world.goes_on.clear()
    kept.replenish(layout)
    eventually(lambda: world.prepared == 1, "somebody is being prepared")
    with kept.moving(layout, [0]) as move:
        assert move.arrivals == {}
    assert not kept._idle.is_set()
    world.nodes = ["0"]
    with kept.moving(layout, [1]) as move:
        assert move.arrivals == {1: None}
        assert kept._idle.is_set()


def test_a_preparation_that_fails_is_tried_again_for_some_time_and_not_after_the_end(
    world, monkeypatch, caplog
):
    monkeypatch.setattr(keeping, "_PAUSES_S", (0.01, 0.02))
    layout, kept = reserved(1, 0)
    kept._n_standbys, world.failures = 1, 2
    kept.replenish(layout)
    eventually(lambda: shown(kept) == {1: 1} and not preparing(), "somebody stands by")
    assert "which is tried again in 0.02 s: Ray does not answer" in caplog.text
    kept._standbys.clear()
    world.failures = 5
    kept.replenish(layout)
    eventually(lambda: not preparing(), "it is given up")
    assert "again after the next restart: Ray" in caplog.text and world.failures == 2
    monkeypatch.setattr(keeping, "_PAUSES_S", (3600.0,))
    kept.replenish(layout)
    eventually(lambda: "again in 3600 s" in caplog.text, "it waits")
    kept.end(2)
    eventually(lambda: not preparing(), "it has ended")


def test_the_end_waits_for_a_preparation_and_nothing_is_prepared_then(world):
    layout, kept = reserved(1, 0)
    kept._n_standbys = 1
    world.goes_on.clear()
    kept.replenish(layout)
    eventually(lambda: world.prepared == 1, "somebody is being prepared")
    assert kept.end(2) == Ended()
    assert (kept.spares, holders(layout), kept._idle.is_set()) == ([], [0, 3], True)
    kept.replenish(layout)
    kept.prepare(layout)
    assert world.prepared == 1


def test_who_can_not_be_ended_keeps_the_bundles(world):
    layout, kept = reserved(1, 1)
    world.occupied = True
    ended = kept.end(2)
    assert (ended.left, ended.occupied) == ({2: "it stood by, without a rank: it lingers"}, True)
    assert holders(layout) == [0, 1, 3]


def test_a_move_that_outlasts_the_end_leaves_nothing(world):
    layout, kept = reserved(1, 1)
    with kept.moving(layout, [0]) as move:
        assert kept.end(2) == Ended()
        move.is_made = True
    assert (kept.spares, holders(layout)) == ([], [1, 3])
