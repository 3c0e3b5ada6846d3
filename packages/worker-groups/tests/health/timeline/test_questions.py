"""Nodes are asked when calls ran: what they answer, by this process's clock; what is lost is counted."""

import threading
import time
from types import SimpleNamespace

import pytest
from patience import PATIENCE_S

from raycrew.worker_groups._health.questions import Answer, UnansweredError
from raycrew.worker_groups._health.timeline import questions
from raycrew.worker_groups._health.timeline.ledger import Gone, Ran
from raycrew.worker_groups._health.timeline.questions import NodeWorkers
from raycrew.worker_groups._on_nodes import clock_name
from raycrew.worker_groups._on_nodes.ring import SIZE, Ring

CALL = b"a" * 24


def noted(*calls):
    """What a ring tells of calls: method, when it began and ended, how long it paused."""
    ring = Ring(memoryview(bytearray(SIZE)))
    for method, began, ended, paused_s in calls:
        ring.note(CALL, method, began, ended, paused_s)
    return ring.since(0)[1]


def ask(workers, *args, **kwargs):
    most, ran = workers.ask(*args, **kwargs)
    told = list(ran)
    assert len(told) <= most
    return told


def place(mark, node_id="n"):
    return SimpleNamespace(facts=SimpleNamespace(mark=mark, node_id=node_id))


@pytest.fixture
def nodes(monkeypatch):
    """Answers by node; what was asked."""
    answers, asked = {}, []

    def ask_timed(method, workers, timeout_s, more, *, may_make):
        assert 0 < timeout_s <= questions.LOOK_WITHIN_S
        meanwhile = getattr(found, "meanwhile", lambda: None)
        meanwhile()
        found.seen = more
        asked.append((method, sorted(facts.mark for facts in workers.values()), may_make))
        return {
            node_id: Answer(answer, *found.times) if isinstance(answer, list) else answer
            for node_id, answer in answers.items()
            if node_id in {facts.node_id for facts in workers.values()}
        }

    monkeypatch.setattr(questions, "ask_timed", ask_timed)
    now = time.monotonic()
    found = SimpleNamespace(answers=answers, asked=asked, times=(now, now + 0.5))
    return found


def test_who_is_followed_is_asked_at_once_and_then_with_the_others(nodes):
    workers = NodeWorkers()
    nodes.answers["n"] = [("there", 1e6, 0, 0, b"")]
    workers.follow("policy", {0: place("one"), 1: SimpleNamespace(facts=None)})
    nodes.answers["m"] = [("there", 1e6, 0, 0, b"")]
    workers.follow("policy", {0: place("one"), 1: place("two", "m")})
    assert ask(workers) == []
    assert ask(workers, is_last=True) == []
    assert nodes.asked.pop() == ("record_last", ["one", "two"], False)
    assert nodes.asked == [
        ("record", ["one"], True),
        ("record", ["two"], True),
        ("record", ["one", "two"], False),
    ]
    assert workers.lost == 0


def test_times_are_of_this_processs_clock_and_those_before_it_began_are_left_out(nodes):
    workers = NodeWorkers()
    now = workers._began + 1.0
    nodes.answers["n"] = [
        (clock_name(), now, 0, 2, noted((b"old", 0.0, 0.5, 0.0), (b"m", now, now + 1, 0.25)))
    ]
    workers.follow("policy", {3: place("one")})
    nodes.answers["n"] = [(clock_name(), now, 2, 2, b"")]
    assert ask(workers) == [Ran(CALL, "policy", 3, "m", now, now + 1, 0.25)]
    assert ask(workers) == []
    assert workers.clocks.bounds() == {"n": 0.0}
    nodes.answers["m"] = [("there", 1e9, 0, 1, noted((b"far", 1e9 + 7, 1e9 + 8, 0.0)))]
    workers.follow("policy", {4: place("two", "m")})
    ran = next(ran for ran in ask(workers) if ran.method == "far")
    assert ran.ended - ran.began == pytest.approx(1.0)
    assert workers._began <= ran.began - 7 <= workers._began + 60


def test_what_was_overwritten_is_counted_and_an_answer_that_got_lost_is_asked_for_again(nodes):
    workers = NodeWorkers()
    nodes.answers["n"] = [(clock_name(), 1.0, 5, 5, b"")]
    workers.follow("policy", {0: place("one")})
    nodes.answers["n"] = [(clock_name(), 1.0, 5, 9, noted((b"m", 1e9, 1e9, 0.0)))]
    ask(workers)
    assert workers.lost == 3
    assert nodes.seen == {0: 5}
    nodes.answers["n"] = UnansweredError("its node n does not answer in time", node_is_gone=False)
    ask(workers)
    ask(workers)
    assert nodes.seen == {0: 9}
    assert workers.lost == 3


@pytest.mark.hostile
def test_what_ran_before_a_first_answer_that_came_too_late_is_told(nodes):
    workers, now = NodeWorkers(), time.monotonic() + 1
    nodes.answers["n"] = UnansweredError("its node n does not answer in time", node_is_gone=False)
    workers.follow("policy", {0: place("one")})
    assert nodes.seen == {0: None}
    nodes.answers["n"] = [(clock_name(), now, 0, 2, noted((b"m", now, now, 0.0), (b"k", now, now, 0.0)))]
    assert [ran.method for ran in ask(workers)] == ["m", "k"]
    assert (nodes.seen, workers.lost) == ({0: 0}, 0)


@pytest.mark.hostile
@pytest.mark.parametrize(("oldest", "lost"), [(0.0, 0), (1e9, 7)], ids=["of before", "of now"])
def test_of_those_that_were_overwritten_before_it_only_those_count_that_may_be_of_the_timeline(
    nodes, oldest, lost
):
    """The ring may have notes for an earlier timeline: what it has no more is older than what it has."""
    workers = NodeWorkers()
    nodes.answers["n"] = UnansweredError("its node n does not answer in time", node_is_gone=False)
    workers.follow("policy", {0: place("one")})
    notes = noted((b"old", oldest, oldest, 0.0), (b"m", 1e9, 1e9, 0.0))
    nodes.answers["n"] = [(clock_name(), 1.0, 0, 9, notes)]
    assert ask(workers)[-1].method == "m"
    assert workers.lost == lost


def test_a_node_that_is_silent_is_said_once_and_asked_again(nodes, caplog):
    workers = NodeWorkers()
    nodes.answers["n"] = UnansweredError("its node n does not answer", node_is_gone=False)
    workers.follow("policy", {0: place("one")})
    ask(workers)
    assert caplog.text.count("does not answer") == 1
    nodes.answers["n"] = [(clock_name(), 1.0, 0, 1, noted((b"m", 1e9, 1e9, 0.0)))]
    assert len(ask(workers)) == 1
    workers.follow("policy", {1: place("two", "m")})
    nodes.answers["m"] = ["it can't be opened"]
    nodes.answers["n"] = [None]
    (gone,) = ask(workers)
    assert gone == Gone("policy", 0, gone.before)
    nodes.asked.clear()
    ask(workers)
    assert nodes.asked == [("record", [], False)], "who is gone is asked no more"
    assert "rank 1 of policy runs calls is not known: it can't be opened" in caplog.text
    assert "rank 0" not in caplog.text


def test_calls_of_a_worker_that_is_gone_are_those_before_another_one_was_in_its_place(nodes):
    workers = NodeWorkers()
    nodes.answers["n"] = [("there", 1e6, 0, 0, b"")]
    workers.follow("policy", {0: place("one")})
    before = time.monotonic()
    workers.follow("policy", {0: place("two"), 1: place("three", "m")})
    after = time.monotonic()
    nodes.answers["n"] = [None, ("there", 1e6, 0, 0, b"")]
    (gone,) = ask(workers)
    assert (gone[:2], before <= gone.before <= after) == (("policy", 0), True)


@pytest.mark.parametrize("asked_for", ["follow", "ask"])
def test_workers_of_a_node_that_is_gone_are_gone_with_it(nodes, caplog, asked_for):
    workers, told = NodeWorkers(), ("there", 1e6, 0, 0, b"")
    nodes.answers |= {"n": [told, told], "m": [told]}
    gone = UnansweredError("its node n is gone", node_is_gone=True)
    if asked_for == "follow":
        nodes.answers["n"] = gone
    workers.follow("policy", {0: place("one"), 1: place("two", "m"), 2: place("three")})
    nodes.answers["n"] = gone
    assert [found[:2] for found in ask(workers)] == [("policy", 0), ("policy", 2)]
    nodes.asked.clear()
    assert ask(workers) == []
    assert nodes.asked == [("record", ["two"], False)], "who is gone is asked no more"
    assert not caplog.text, "that is known of them"


@pytest.mark.hostile
def test_a_handler_of_a_signal_may_ask_while_its_thread_does_and_waits_for_no_other(nodes):
    workers, found = NodeWorkers(), []
    nodes.answers["n"] = [(clock_name(), 1.0, 0, 1, noted((b"m", 1e9, 1e9, 0.0)))]

    def handle():
        workers.follow("policy", {1: place("two")})
        found.append(ask(workers))
        other = threading.Thread(target=lambda: found.append(ask(workers, 0.01)), daemon=True)
        other.start()
        other.join(PATIENCE_S)

    nodes.meanwhile = handle
    asking = threading.Thread(target=workers.follow, args=("policy", {0: place("one")}), daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    assert (asking.is_alive(), found) == (False, [[], []])
    assert nodes.asked == [("record", ["one"], True)]
    nodes.answers.clear(), nodes.asked.clear()
    nodes.meanwhile = list
    ask(workers)
    assert nodes.asked == [("record", ["one", "two"], False)], "who came meanwhile is asked later"
