"""What the driver and workers know of calls is put together, in whatever order it comes."""

from hypothesis import given
from hypothesis import strategies as st

from raycrew.worker_groups._health.timeline import ledger as module
from raycrew.worker_groups._health.timeline.ledger import PATIENCE_S, Gone, Ledger, Ran
from raycrew.worker_groups._health.timeline.records import Call, Part

A, B = b"a" * 24, b"b" * 24
RAN_A = Ran(A, "policy", 0, "train", 1.5, 2.0)
RAN_B = Ran(B, "policy", 1, "train", 1.5, 3.0, 0.25)
WHOLE = Call("policy", "train", 1.0, (Part(0, 1.5, 2.0), Part(1, 1.5, 3.0, 0.25)), 3.5, True, "balancer")

AMENDED = []

STEPS = {
    "sent": lambda ledger: ledger.sent(1.0, "policy", "train", [0, 1], [A, B]),
    "a": lambda ledger: ledger.ran(2.1, RAN_A),
    "b": lambda ledger: ledger.ran(3.1, RAN_B),
    "labelled": lambda ledger: ledger.labelled(A, "balancer"),
    "taken": lambda ledger: ledger.taken(3.5, A, True),
}


def ledger_and_closed(**options):
    closed = []
    return Ledger(closed.append, lambda *both: AMENDED.append(both), **options), closed


@given(st.permutations(["a", "b", "sent", "labelled", "taken"]))
def test_the_order_does_not_matter_but_that_of_what_the_driver_says(order):
    said = iter(["sent", "labelled", "taken"])  # in this order by the driver, whatever workers tell meanwhile
    ledger, closed = ledger_and_closed()
    for step in [step if step in ("a", "b") else next(said) for step in order]:
        assert closed == []
        STEPS[step](ledger)
    assert closed == [WHOLE], "as soon as all is known"
    ledger.settle(4.0)
    assert (closed, list(ledger.unfinished())) == ([WHOLE], []), "once"


def test_a_call_that_nobody_takes_or_a_rank_does_not_tell_of_is_closed_after_a_while():
    ledger, closed = ledger_and_closed()
    STEPS["sent"](ledger)
    STEPS["a"](ledger)
    STEPS["b"](ledger)
    assert dict(ledger.open_calls()) == {"policy": 0}
    ledger.settle(3.1 + PATIENCE_S)
    assert closed == []
    ledger.settle(3.2 + PATIENCE_S)
    assert closed == [Call("policy", "train", 1.0, WHOLE.parts)]
    STEPS["sent"](ledger)
    STEPS["a"](ledger)
    assert dict(ledger.open_calls()) == {"policy": 1}
    ledger.settle(1e9)
    assert len(closed) == 1, "it runs on rank 1 for all that is known"
    ledger.taken(10.0, B, False)
    assert dict(ledger.open_calls()) == {"policy": 0}
    ledger.taken(11.0, A, True)
    ledger.settle(10.0 + PATIENCE_S)
    assert len(closed) == 1
    ledger.settle(10.1 + PATIENCE_S)
    assert closed[1] == Call("policy", "train", 1.0, (Part(0, 1.5, 2.0), Part(1)), 10.0, False)


def test_a_worker_that_is_gone_is_in_none_of_its_calls_and_those_of_its_successor_are_open():
    ledger, closed = ledger_and_closed()
    STEPS["sent"](ledger)
    STEPS["a"](ledger)
    ledger.sent(4.0, "policy", "train", [1], [b"c" * 24])
    ledger.gone(5.0, Gone("other", 1, 9.0))
    assert dict(ledger.open_calls()) == {"policy": 2}
    ledger.gone(5.0, Gone("policy", 1, 4.0))
    assert dict(ledger.open_calls()) == {"policy": 1}
    ledger.settle(5.1 + PATIENCE_S)
    assert closed == [Call("policy", "train", 1.0, (Part(0, 1.5, 2.0), Part(1)))], "nobody takes it"
    ledger.sent(6.0, "policy", "train", [0, 1], [b"d" * 24, b"e" * 24])
    ledger.taken(7.0, b"e" * 24, False)
    ledger.ran(7.0, RAN_A._replace(call=b"d" * 24))
    ledger.gone(7.0, Gone("policy", 1, 7.0))
    assert len(closed) == 2, "as soon as all is known"
    assert dict(ledger.open_calls()) == {"policy": 0}, "the successor is gone, too"


def test_what_nobody_here_has_sent_is_another_processes():
    ledger, closed = ledger_and_closed()
    ledger.ran(2.0, RAN_B)
    ledger.settle(3.0)
    assert closed == []
    ledger.settle(3.1)
    assert closed == [Call("policy", "train", None, (Part(1, 1.5, 3.0, 0.25),), label="another process")]
    ledger.ran(5.0, RAN_A)
    assert [call.parts[0].rank for call in ledger.unfinished()] == [0]


def test_no_more_are_open_than_there_may_be():
    ledger, closed = ledger_and_closed(most=2)
    for i in range(5):
        ledger.sent(float(i), "policy", "train", [0], [bytes([i]) * 24])
    assert [call.sent for call in closed] == [0.0, 1.0, 2.0]
    ledger.taken(9.0, bytes([0]) * 24, True)
    ledger.labelled(bytes([0]) * 24, "late")
    unfinished = list(ledger.unfinished())
    assert [call.sent for call in unfinished] == [3.0, 4.0]
    assert all(call.taken is None for call in (*closed, *unfinished))
    roomy, closed = ledger_and_closed(most=3)
    for i in range(2):
        roomy.sent(float(i), "policy", "train", [0], [bytes([i]) * 24])
    assert (closed, len(list(roomy.unfinished()))) == ([], 2), "of fewer, none is closed"


def test_a_call_of_many_ranks_takes_the_room_of_many():
    ledger, closed = ledger_and_closed(most=4)
    for i in range(4):
        ledger.sent(float(i), "policy", "train", [0, 1], [bytes([i, rank]) * 12 for rank in range(2)])
    assert [call.sent for call in closed] == [0.0, 1.0]
    ledger.sent(4.0, "policy", "train", range(9), [bytes([9, rank]) * 12 for rank in range(9)])
    assert [call.sent for call in closed] == [0.0, 1.0, 2.0, 3.0]
    assert [call.sent for call in ledger.unfinished()] == [4.0], "the last one is there, however large"


def test_a_rank_that_tells_of_a_call_that_was_closed_without_it_amends_the_call():
    AMENDED.clear()
    ledger, closed = ledger_and_closed()
    STEPS["sent"](ledger)
    ledger.taken(1.0, A, False)
    ledger.settle(1.1 + PATIENCE_S)
    (untold,) = closed
    assert untold.parts == (Part(0), Part(1))
    ledger.ran(20.0, RAN_B)
    ledger.ran(21.0, RAN_A)
    ledger.settle(1e9)
    first, second = AMENDED
    assert closed == [untold], "and there is no call of another process"
    assert first[0] is untold
    assert second[0] is first[1]
    assert second[1] == Call("policy", "train", 1.0, WHOLE.parts, 1.0, False)


def test_no_more_ranks_may_tell_of_closed_calls_than_are_remembered(monkeypatch):
    AMENDED.clear()
    monkeypatch.setattr(module, "MOST_LATE", 1)
    ledger, closed = ledger_and_closed()
    STEPS["sent"](ledger)
    ledger.taken(1.0, A, False)
    ledger.settle(1.1 + PATIENCE_S)
    ledger.ran(20.0, RAN_B)
    ledger.ran(20.0, RAN_A)
    ledger.settle(1e9)
    assert [after.parts for _, after in AMENDED] == [(Part(0), WHOLE.parts[1])]
    assert len(closed) == 2
