"""Spans of one row that overlap are drawn in lanes. Pure."""

import heapq
from collections.abc import Iterable, Iterator

from raycrew.worker_groups._health.observers import Span


def in_lanes(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """Each span with the lowest lane that is free when it starts; in the order of their starts."""
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    n_lanes = 0
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        while busy and busy[0][0] <= span.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, n_lanes = n_lanes, n_lanes + 1
        heapq.heappush(busy, (span.end, lane))
        yield lane, span
