"""Lanes, a trace, statistics and a page from spans."""

import json
import math
from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timeline_calls import SECONDS, any_calls

from raycrew.worker_groups import GroupShares, SlowestRank
from raycrew.worker_groups._health.observers import Span
from raycrew.worker_groups._health.timeline.drawing.chrome import label_of, natural, rows_of, trace_of
from raycrew.worker_groups._health.timeline.drawing.lanes import in_lanes
from raycrew.worker_groups._health.timeline.drawing.page import page_of
from raycrew.worker_groups._health.timeline.drawing.statistics import (
    TimelineStatistics,
    covered_s,
    statistics_of,
)
from raycrew.worker_groups._health.timeline.records import Call, Part, spans_of

TRAIN = [
    Call("policy", "train", 0.0, (Part(0, 0.0, 4.0), Part(1, 1.0, 2.0)), 4.0, True),
    Call("policy", "train", 4.0, (Part(0, 5.0, 6.0), Part(1, 5.0, 8.0)), 8.5, True),
    Call("policy", "save", 8.0, (Part(0, 8.0, 10.0),), 10.0, True),
]


@st.composite
def any_spans(draw):
    start, length = draw(SECONDS), draw(SECONDS)
    return Span("policy", draw(st.sampled_from(["rank 2", "rank 10"])), "x", "running", start, start + length)


@given(st.lists(any_spans(), max_size=30))
def test_spans_of_a_lane_do_not_overlap_and_there_is_no_lane_too_many(spans):
    placed = list(in_lanes(spans))
    assert sorted(map(id, spans)) == sorted(id(span) for _, span in placed)
    for _, lane in groupby(
        sorted(placed, key=lambda pair: (pair[0], pair[1].start, pair[1].end)), lambda p: p[0]
    ):
        assert all(a.end <= b.start for (_, a), (_, b) in pairwise(list(lane)))
    for lane, span in placed:
        before = {other for other, one in placed if one.start <= span.start < one.end}
        assert set(range(lane)) <= before, "all lower ones were busy"


@given(st.lists(any_calls(), max_size=8))
def test_a_trace_has_each_span_once_and_none_that_overlaps_in_its_thread(calls):
    spans = [span for call in calls for span in spans_of(call)]
    trace = json.loads(json.dumps(trace_of(spans, {"began": "now"}), allow_nan=False))
    assert trace["otherData"] == {"began": "now"}
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = {(e["pid"], e["tid"]): e["args"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert len(events) == len(spans)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events)
    assert not spans or min(event["ts"] for event in events) == 0
    assert {(event["pid"], event["tid"]) for event in events} == set(names)
    by_thread = sorted(events, key=lambda e: (e["pid"], e["tid"], e["ts"], e["dur"]))
    for _, thread in groupby(by_thread, lambda e: (e["pid"], e["tid"])):
        for one, other in pairwise(list(thread)):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-3


def test_a_trace_names_tracks_and_rows_in_their_order():
    spans = [Span("b", f"rank {r}", "x", "running", 1.0, 3.0, {"n": 1}) for r in (10, 9)]
    spans += [Span("a", "m", "y", "step", 2.0, 2.5), Span("b", "rank 9", "z", "waiting", 2.0, 4.0)]
    trace = trace_of(spans, {})
    told = [(e["name"], e["pid"], e["tid"], e["args"]) for e in trace["traceEvents"] if e["ph"] == "M"]
    assert [t[3]["name"] for t in told if t[0] == "process_name"] == ["a", "b"]
    assert [t[3]["name"] for t in told if t[0] == "thread_name"] == ["m", "rank 9", "rank 9 (2)", "rank 10"]
    assert [t[3]["sort_index"] for t in told if t[0] == "thread_sort_index"] == [1, 1, 2, 3]
    assert [t[3]["sort_index"] for t in told if t[0] == "process_sort_index"] == [1, 2]
    (event,) = (e for e in trace["traceEvents"] if e["name"] == "y")
    assert event == {
        "ph": "X", "name": "y", "cat": "step", "pid": 1, "tid": 1, "ts": 1e6, "dur": 0.5e6,
        "args": {"kind": "step"},
    }  # fmt: skip
    assert [e["args"] for e in trace["traceEvents"] if e["name"] == "x"] == [{"kind": "running", "n": 1}] * 2
    assert trace_of([], {}) == {"traceEvents": [], "displayTimeUnit": "ms", "otherData": {}}


def test_rows_that_overlap_get_numbers_and_ranks_their_order():
    spans = [Span("t", "rank 0", "x", "running", 0.0, 2.0), Span("t", "rank 0", "y", "running", 1.0, 3.0)]
    assert list(rows_of(spans)["t"]) == [("rank 0", 0), ("rank 0", 1)]
    assert label_of("rank 0", 1) == "rank 0 (2)"
    assert label_of("rank 0", 0) == "rank 0"
    assert sorted(["rank 10", "rank 9", "main", "rank x"], key=natural) == [
        "main",
        "rank x",
        "rank 9",
        "rank 10",
    ]
    assert sorted(["rank 0", "rank x", "rank"], key=natural) == ["rank", "rank x", "rank 0"]


def test_what_groups_did_and_whom_they_waited_for():
    found = statistics_of(TRAIN)
    (shares,) = found.groups
    assert shares == GroupShares("policy", 2, 10.0, *map(pytest.approx, (11 / 20, 4 / 20, 5 / 20)))
    assert found.slowest == (SlowestRank("policy", "train", 2, 0, 1, 4.0, 4.0),)
    assert (found.calls, found.untold) == (3, 0)
    lost = statistics_of([Call("policy", "train", 0.0, (Part(0), Part(1, 0.0, 1.0)), 1.0, False), *TRAIN])
    assert (lost.calls, lost.untold) == (4, 1)
    assert statistics_of([Call("policy", "train", 0.0, (Part(0),))]).groups == ()


def test_of_no_calls_there_is_nothing_to_tell():
    assert statistics_of([]) == TimelineStatistics()
    assert (TimelineStatistics().calls, TimelineStatistics().untold) == (0, 0)


def test_the_slowest_is_who_was_last_most_often():
    ends = [(1.0, 2.0, 3.0), (1.0, 5.0, 3.0), (2.0, 4.0, 1.0), (2.0, 2.0, 1.0)]
    calls = [
        Call("g", "m", 0.0, tuple(Part(rank, 0.0, end) for rank, end in enumerate(each)), None)
        for each in ends
    ]
    assert statistics_of(calls).slowest == (SlowestRank("g", "m", 4, 1, 2, 14 / 4, 3.0 + 6.0 + 5.0 + 1.0),)


@given(st.lists(any_calls(), max_size=8))
def test_shares_are_none_negative_and_come_to_one(calls):
    found = statistics_of(calls)
    for shares in found.groups:
        parts = (shares.busy, shares.waiting, shares.idle)
        assert all(0 <= part <= 1 for part in parts)
        assert math.isclose(sum(parts), 1)
    assert found.calls == len(calls)
    assert all(one.lost_s >= 0 and one.mean_s >= 0 and 1 <= one.times <= one.calls for one in found.slowest)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10)), max_size=8))
def test_time_is_covered_once_however_many_cover_it(spans):
    whole = {second for start, length in spans for second in range(start, start + length)}
    assert covered_s((start, start + length) for start, length in spans) == len(whole)


@given(st.lists(any_calls(), max_size=5))
def test_a_page_has_all_in_itself_and_ends_its_script_once(calls):
    spans = [span for call in calls for span in spans_of(call)]
    page = page_of(spans, statistics_of(calls), {"dropped": 0, "x": "<!--"})
    assert "/*DATA*/" not in page
    assert page.count("</script>") == 1
    assert "<!--" not in page
    assert not any(word in page for word in ("http://", "https://", "src=", "@import", "fetch("))
    data = json.loads(page.split("const data = ")[1].split(";\n")[0])
    bars = [bar for row in data["rows"] for bar in row["bars"]]
    assert len(bars) == len(spans)
    assert sorted({data["names"][bar[0]] for bar in bars}) == sorted({span.name for span in spans})
    assert all(bar[1] >= 0 and bar[2] >= 0 for bar in bars)
    for row in data["rows"]:
        assert all(a[1] + a[2] <= b[1] + 1e-6 for a, b in pairwise(row["bars"]))


@given(st.floats(0, 1e4), st.floats(0, 1e4))
def test_bars_of_a_page_are_exact_to_less_than_a_microsecond_and_short_to_write(start, length):
    spans = [Span("t", "r", "x", "k", 0.0, 1.0), Span("t", "s", "x", "k", start, start + length)]
    page = page_of(spans, statistics_of([]), {})
    data = json.loads(page.split("const data = ")[1].split(";\n")[0])
    ((_, began, took, _),) = data["rows"][1]["bars"]
    assert abs(began - start) < 1e-7 and abs(took - length) < 1e-7
    assert all(len(f"{number:.9f}".rstrip("0").partition(".")[2]) <= 7 for number in (began, took))


def test_a_group_whose_calls_took_no_time_was_idle():
    found = statistics_of([Call("g", "m", 1.0, (Part(0, 1.0, 1.0), Part(1, 1.0, 1.0)), 1.0)])
    assert found.groups == (GroupShares("g", 2, 0.0, 0.0, 0.0, 1.0),)


def test_shares_of_a_short_while_are_as_exact():
    short = [
        Call(
            c.group,
            c.method,
            c.sent / 100,
            tuple(Part(p.rank, p.began / 100, p.ended / 100) for p in c.parts),
        )
        for c in TRAIN
    ]
    (shares,) = statistics_of(short).groups
    assert shares == GroupShares("policy", 2, *map(pytest.approx, (0.1, 11 / 20, 4 / 20, 5 / 20)))


def test_a_time_that_is_no_number_makes_no_page_that_can_not_be_shown():
    with pytest.raises(ValueError, match="JSON compliant"):
        page_of([Span("t", "r", "x", "k", 0.0, math.inf)], statistics_of([]), {})
