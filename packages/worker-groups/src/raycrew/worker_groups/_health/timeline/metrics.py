"""Counters and histograms of calls, in the Prometheus endpoint of Ray's nodes."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from raycrew.worker_groups._health.observers import Span
from raycrew.worker_groups._health.timeline.records import NOW, Call, Wants
from raycrew.worker_groups._ray import counter, gauge, histogram

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)

#: By name, what each is of and its labels. Ray puts "ray_" before a name, and "_total" behind a counter's.
COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "calls": ("Calls that have ended.", ("group", "method", "outcome")),
    "fan_out_items": ("Items of fan_out that have ended.", ("function", "stop")),
    "fan_out_bytes": ("Bytes of items and results of fan_out.", ("direction",)),
    "rollouts": ("Rollouts of a pool, and their prompts, to which that has happened.", ("pool", "what")),
    "rollout_seconds": ("From the pulling of prompts to the end of their last rollouts.", ("pool",)),
    "samples": ("Samples of a queue to which that has happened.", ("queue", "what")),
    "sample_versions_behind": ("Versions that handed out samples were behind.", ("queue",)),
    "sample_waited_seconds": ("Seconds since handed out samples had come.", ("queue",)),
    "restarts": ("Workers that were replaced.", ("group",)),
    "stalls": ("Workers that were found stuck.", ("group", "rank", "reason")),
    "update_bytes": ("Bytes of weights that generators have fetched.", ("update",)),
}
HISTOGRAMS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "call_seconds": ("From the sending of a call to the end of its last rank.", ("group", "method")),
    "queued_seconds": ("Of each rank, from the sending of a call to its beginning.", ("group", "method")),
    "running_seconds": ("Of each rank, from the beginning of a call to its end.", ("group", "method")),
    "update_seconds": ("Of each phase of a weight update, on each rank.", ("update", "phase")),
}
GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "open_calls": ("Calls that were sent and have not ended.", ("group",)),
}


def full_name(name: str) -> str:
    """What a metric is called in Ray."""
    return f"raycrew_{name}"


@cache
def _made(name: str) -> Any:
    if name in COUNTERS:
        return counter(full_name(name), *COUNTERS[name])
    if name in GAUGES:
        return gauge(full_name(name), *GAUGES[name])
    return histogram(full_name(name), *HISTOGRAMS[name], _SECONDS)


class RayMetrics:
    """Listens, and counts; all of a process are one, as Ray's metrics are the process's."""

    def __init__(self) -> None:
        self._groups: set[str] = set()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RayMetrics)

    def __hash__(self) -> int:
        return hash(RayMetrics)

    @property
    def wants(self) -> Wants:
        """Now: what is counted is read at any time."""
        return NOW

    def left_out(self) -> None:
        """Nothing is."""

    def call(self, call: Call) -> None:
        """Count a call, and what it took."""
        outcome = {None: "untold", True: "ok", False: "failed"}[call.ok]
        labels = {"group": call.group, "method": call.method}
        self._groups.add(call.group)
        if call.sent is not None:
            self.count("calls", {**labels, "outcome": outcome}, 1.0)
            if call.ended is not None:
                _observe("call_seconds", call.ended - call.sent, labels)
        self._ranks(call, call.running().values())

    def amended(self, before: Call, after: Call) -> None:
        """Count what ranks took that have told of it later."""
        known = before.running()
        self._ranks(after, [times for rank, times in after.running().items() if rank not in known])

    def _ranks(self, call: Call, times: Iterable[tuple[float, float]]) -> None:
        labels = {"group": call.group, "method": call.method}
        for began, ended in times:
            _observe("running_seconds", ended - began, labels)
            if call.sent is not None:
                _observe("queued_seconds", began - call.sent, labels)

    def span(self, span: Span) -> None:
        """Spans are drawn, not counted."""

    def count(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Count what has happened."""
        if value > 0:
            _made(name).inc(float(value), dict(labels))

    def look(self, open_calls: Mapping[str, int]) -> None:
        """Tell how many calls are open, also of groups that have none now."""
        self._groups |= open_calls.keys()
        for group in self._groups:
            _made("open_calls").set(open_calls.get(group, 0), {"group": group})

    def update(self, name: str, phases: Sequence[tuple[str, float]], size_bytes: float) -> None:
        """Count a weight update: phases with their seconds, and its bytes."""
        for phase, seconds in phases:
            _observe("update_seconds", seconds, {"update": name, "phase": phase})
        self.count("update_bytes", {"update": name}, size_bytes)


def _observe(name: str, seconds: float, labels: Mapping[str, str]) -> None:
    _made(name).observe(max(0.0, seconds), dict(labels))
