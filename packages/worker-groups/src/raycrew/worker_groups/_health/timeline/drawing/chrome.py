"""A timeline as a trace that Perfetto and Chrome read. Pure.

The format is Chrome's "Trace Event Format": complete events, with processes for tracks and threads for rows.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raycrew.worker_groups._health.observers import Span
from raycrew.worker_groups._health.timeline.drawing.lanes import in_lanes

_NS = 1e9


def trace_of(spans: Sequence[Span], about: Mapping[str, Any]) -> dict[str, Any]:
    """The trace of some spans.

    Args:
        spans: In any order.
        about: What else is to be said: it is shown as the trace's information.
    """
    origin = min((span.start for span in spans), default=0.0)
    events = [event for events in _tracks(spans, origin) for event in events]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}


def rows_of(spans: Sequence[Span]) -> dict[str, dict[tuple[str, int], list[Span]]]:
    """By track, and there by row and lane: spans that do not overlap, in the order of rows."""
    tracks: dict[str, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        tracks[span.track][span.row].append(span)
    drawn: dict[str, dict[tuple[str, int], list[Span]]] = {}
    for track in sorted(tracks):
        drawn[track] = {}
        for row in sorted(tracks[track], key=natural):
            lanes: dict[int, list[Span]] = defaultdict(list)
            for lane, span in in_lanes(tracks[track][row]):
                lanes[lane].append(span)
            drawn[track] |= {(row, lane): lanes[lane] for lane in sorted(lanes)}
    return drawn


def label_of(row: str, lane: int) -> str:
    """What a row is called."""
    return f"{row} ({lane + 1})" if lane else row


def natural(text: str) -> tuple[tuple[int, str], ...]:
    """A key that puts "rank 10" behind "rank 9"."""
    parts = text.split(" ")
    return tuple((int(part), "") if part.isdecimal() and part.isascii() else (-1, part) for part in parts)


def _tracks(spans: Sequence[Span], origin: float) -> Iterator[list[dict[str, Any]]]:
    for pid, (track, rows) in enumerate(rows_of(spans).items(), 1):
        yield [_named("process", pid, 0, track), _sorted("process", pid, 0, pid)]
        for tid, ((row, lane), drawn) in enumerate(rows.items(), 1):
            yield [_named("thread", pid, tid, label_of(row, lane)), _sorted("thread", pid, tid, tid)]
            yield [_event(span, pid, tid, origin) for span in drawn]


def _event(span: Span, pid: int, tid: int, origin: float) -> dict[str, Any]:
    # Whole nanoseconds first: what only touches must not overlap by a rounding.
    start, end = (round((at - origin) * _NS) for at in (span.start, max(span.start, span.end)))
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": pid,
        "tid": tid,
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "args": {"kind": span.kind, **span.detail},
    }


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _sorted(what: str, pid: int, tid: int, index: int) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": index}}
