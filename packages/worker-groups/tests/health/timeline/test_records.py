"""Calls become spans that follow on each other."""

from itertools import pairwise

from hypothesis import given
from timeline_calls import any_calls

from raycrew.worker_groups._health.observers import Span
from raycrew.worker_groups._health.timeline.records import (
    QUEUED,
    RUNNING,
    UNTOLD,
    WAITING,
    Call,
    Part,
    spans_of,
)


def test_a_call_is_queued_runs_and_waits_for_the_slowest_on_each_rank():
    call = Call("policy", "train", 10.0, (Part(0, 11.0, 12.0), Part(1, 10.5, 15.0)), 15.25, True, "balancer")
    assert list(spans_of(call)) == [
        Span("policy", "rank 0", "train", QUEUED, 10.0, 11.0),
        Span("policy", "rank 0", "train", RUNNING, 11.0, 12.0),
        Span("policy", "rank 0", "train", WAITING, 12.0, 15.0),
        Span("policy", "rank 1", "train", QUEUED, 10.0, 10.5),
        Span("policy", "rank 1", "train", RUNNING, 10.5, 15.0),
        Span(
            "driver", "policy", "train", "call", 10.0, 15.25, {"ranks": 2, "outcome": "ok", "for": "balancer"}
        ),
    ]


def test_of_another_process_only_what_ran_is_known():
    assert list(spans_of(Call("policy", "train", None, (Part(3, 11.0, 12.0, 0.5),)))) == [
        Span("policy", "rank 3", "train", RUNNING, 11.0, 12.0, {"paused_s": 0.5})
    ]
    assert list(spans_of(Call("policy", "train", None, (Part(3),)))) == []


def test_a_rank_that_has_not_told_lasts_as_long_as_the_call():
    lost = Call("policy", "train", 10.0, (Part(0), Part(1, 10.0, 11.0)), 14.0, False)
    assert list(spans_of(lost)) == [
        Span("policy", "rank 0", "train", UNTOLD, 10.0, 14.0),
        Span("policy", "rank 1", "train", RUNNING, 10.0, 11.0),
        Span("driver", "policy", "train", "call", 10.0, 14.0, {"ranks": 2, "outcome": "failed"}),
    ]
    assert lost.running() == {1: (10.0, 11.0)}


@given(any_calls())
def test_spans_of_a_rank_follow_on_each_other_within_the_call(call):
    spans = list(spans_of(call))
    assert all(span.end >= span.start for span in spans)
    if call.sent is not None:
        (whole,) = (span for span in spans if span.track == "driver")
        assert all(
            whole.start <= span.start and span.end <= whole.end for span in spans if span.kind != UNTOLD
        )
    for part in call.parts:
        mine = [span for span in spans if span.row == f"rank {part.rank}"]
        assert [span.kind for span in mine] in (
            [], [UNTOLD], [RUNNING], [QUEUED, RUNNING], [RUNNING, WAITING], [QUEUED, RUNNING, WAITING],
        )  # fmt: skip
        assert all(one.end == other.start for one, other in pairwise(mine))
        if len(mine) == 2 and call.sent is not None:
            assert mine[0].start == call.sent or mine[0].kind == RUNNING


def test_what_is_half_known_of_a_rank_is_not_known():
    for part in (Part(0, 11.0), Part(0, None, 12.0)):
        call = Call("policy", "train", 10.0, (part, Part(1, 11.0, 12.0)), 13.0)
        assert (call.running(), call.ended) == ({1: (11.0, 12.0)}, 12.0)
        assert [span.kind for span in spans_of(call) if span.row == "rank 0"] == [UNTOLD]
