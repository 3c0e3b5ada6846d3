"""What a group tells of its workers' health while some are being replaced; no Ray is needed."""

from types import SimpleNamespace

import pytest

from raycrew.worker_groups._health import GroupHealth, Workers, group_health
from raycrew.worker_groups._health.reports import RunningCall, Seen
from raycrew.worker_groups.sharding._ranks import WorkerFacts


class Group(GroupHealth):
    """Its worker is replaced while its watch is asked."""

    def __init__(self):
        self.workers = Workers([WorkerFacts("a", "10.0.0.1", 1)], ["old"])

    def _open(self):
        pass

    def _workers(self):
        return self.workers

    def _sights(self, workers, timeout_s):
        self.workers = Workers([WorkerFacts("b", "10.0.0.2", 2)], ["new"])
        silent = workers.handles == ["old"]
        return {0: Seen(True, True, calls=(RunningCall("train", 1, 9.0, 9.0),) if silent else ())}

    def _answers(self, workers, ranks, timeout_s):
        return dict.fromkeys(ranks, "ready" if workers.handles == ["new"] else "dead")


@pytest.mark.hostile
def test_a_verdict_names_the_worker_that_it_is_of():
    group = Group()
    stuck = group.detect_stuck_workers(1.0)[0]
    assert (stuck.pid, stuck.node_id) == (1, "a")
    assert group.detect_stuck_workers(1.0) == {}
    assert group.get_worker_status() == {0: "ready"}


class Beginning(GroupHealth):
    """Its worker begins a call between the look at it and the question to itself."""

    def __init__(self, *later):
        self.looks = iter([Seen(True, True), *later])
        self.asked = []

    def _open(self):
        pass

    def _workers(self):
        return Workers([WorkerFacts("a", "10.0.0.1", 1)], ["worker"])

    def _sights(self, workers, timeout_s):
        return {0: next(self.looks)}

    def _answers(self, workers, ranks, timeout_s):
        self.asked.append(timeout_s)
        return dict.fromkeys(ranks, "busy")


def test_a_call_that_begins_as_its_rank_is_asked_is_told_at_once():
    group = Beginning(Seen(True, True, calls=(RunningCall("train", 1, 0.1, 0.1),)))
    status = group.get_worker_status(timeout=60.0)[0]
    assert (status, status.method) == ("busy", "train")
    assert group.asked == [pytest.approx(0.1)], "nobody waits for the answer of one who is seen to be busy"


def test_a_watch_that_falls_silent_leaves_what_was_seen_before():
    group = Beginning("its node does not answer", Seen(is_alive=False))
    assert group.get_worker_status(timeout=60.0) == {0: "dead"}
    assert group.asked == [pytest.approx(0.1), pytest.approx(0.2)]


def test_who_neither_answers_nor_is_seen_in_a_call_is_waited_for_no_longer(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(group_health, "time", SimpleNamespace(monotonic=lambda: clock.now))
    group = Beginning(*[Seen(True, True)] * 2)
    ask = group._answers

    def answers(workers, ranks, timeout_s):
        clock.now += timeout_s
        return ask(workers, ranks, timeout_s)

    group._answers = answers
    assert group.get_worker_status(timeout=0.5) == {0: "busy"}
    assert group.asked == [pytest.approx(each) for each in (0.1, 0.2, 0.2)]


class Seeing(GroupHealth):
    """Its workers are seen as their names say, and must not be asked."""

    name = "seeing"

    def _open(self):
        pass

    def _workers(self):
        names = ["idle", "busy", "stopped", "dead", "unknown"]
        return Workers([WorkerFacts("a", "10.0.0.1", pid) for pid in range(len(names))], names)

    def _sights(self, workers, timeout_s):
        seen = {
            "idle": Seen(True, True),
            "busy": Seen(True, True, calls=(RunningCall("train", 1, 9.0, 4.0),)),
            "stopped": Seen(True, True, is_stopped=True),
            "dead": Seen(is_alive=False),
            "unknown": "its node does not answer",
        }
        assert [facts.pid for facts in workers.facts] == [list(seen).index(name) for name in workers.handles]
        return {position: seen[name] for position, name in enumerate(workers.handles)}

    def _answers(self, workers, ranks, timeout_s):
        raise AssertionError("nobody is asked")


def test_a_ping_tells_what_is_seen_and_asks_nobody():
    told = Seeing().ping()
    assert told == {0: "ready", 1: "busy", 2: "busy", 3: "dead"}
    assert (told[1].method, told[1].silent_s) == ("train", 4.0)
    assert Seeing().ping([3, 1]) == {3: "dead", 1: "busy"}
    assert Seeing().ping([4]) == {}


def test_a_ping_of_a_rank_that_is_not_there_is_refused():
    for rank in (5, -1):
        with pytest.raises(ValueError, match=f"no ranks \\[{rank}\\], only 0 to 4"):
            Seeing().ping([0, rank])
