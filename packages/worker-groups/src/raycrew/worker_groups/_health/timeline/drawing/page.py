"""A timeline as one page that needs nothing else: no network, no other file. Pure, but for its template."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import Any

from raycrew.worker_groups._health.observers import Span
from raycrew.worker_groups._health.timeline.drawing.chrome import label_of, rows_of
from raycrew.worker_groups._health.timeline.drawing.statistics import TimelineStatistics

_DATA = "/*DATA*/null"


def page_of(spans: Sequence[Span], statistics: TimelineStatistics, about: Mapping[str, Any]) -> str:
    """The page: a chart with a row per rank, how idle each group was, and which ranks were the slowest.

    Args:
        spans: In any order.
        statistics: Of the calls that they are of.
        about: What else is to be said, by name.
    """
    data = {**_chart(spans), **asdict(statistics), "about": dict(about)}
    # In a script "</script>" and "<!--" would end it, wherever they stand.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return _template().replace(_DATA, text)


def _chart(spans: Sequence[Span]) -> dict[str, Any]:
    origin = min((span.start for span in spans), default=0.0)
    names: dict[str, int] = {}
    rows: list[dict[str, Any]] = []
    for track, drawn in rows_of(spans).items():
        for (row, lane), several in drawn.items():
            bars = [
                [
                    names.setdefault(span.name, len(names)),
                    round(span.start - origin, 7),
                    round(span.end - span.start, 7),
                    names.setdefault(span.kind, len(names)),
                ]
                for span in several
            ]
            rows.append({"track": track, "row": label_of(row, lane), "bars": bars})
    return {"names": list(names), "rows": rows}


@cache
def _template() -> str:
    return files(__package__).joinpath("page.html").read_text(encoding="utf-8")
