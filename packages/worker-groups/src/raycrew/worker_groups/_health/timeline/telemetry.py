"""Calls as spans of OpenTelemetry, where its API is installed; where they go is for its SDK to say."""

import time
from collections.abc import Mapping
from typing import Any

from raycrew.worker_groups._health.observers import Span
from raycrew.worker_groups._health.timeline.records import NOTHING, NOW, Call, Wants


def is_installed() -> bool:
    """Whether OpenTelemetry's API is."""
    return _api() is not None


def _api() -> Any:
    """Its contexts and its traces; imported here, as most programs do without."""
    try:
        from opentelemetry import context, trace
    except ImportError:
        return None
    return context, trace


class OpenTelemetrySpans:
    """Listens, and makes a span of each call, with one of each rank in it; all of a process are one.

    Raises:
        ImportError: OpenTelemetry's API is not installed.
    """

    def __init__(self) -> None:
        found = _api()
        if found is None:
            raise ImportError("open_telemetry=True needs the package opentelemetry-api")
        self._context, self._trace = found
        self._tracer = self._trace.get_tracer("raycrew.worker_groups")
        self._epoch_s = time.time() - time.monotonic()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpenTelemetrySpans)

    def __hash__(self) -> int:
        return hash(OpenTelemetrySpans)

    def capture(self) -> Any:
        """The context that a call is sent in: its span becomes the parent."""
        return self._context.get_current() if self._are_wanted() else None

    @property
    def wants(self) -> Wants:
        """Nothing while nobody has said where spans go."""
        return NOW if self._are_wanted() else NOTHING

    def left_out(self) -> None:
        """Nobody wants it."""

    def call(self, call: Call) -> None:
        """Make the spans of a call."""
        if call.start is None or not self._are_wanted():
            return
        end = max(t for t in (call.start, call.ended, call.taken) if t is not None)
        attributes: dict[str, Any] = {"raycrew.group": call.group, "raycrew.method": call.method}
        span = self._tracer.start_span(
            f"{call.group}.{call.method}",
            context=call.context,
            start_time=self._ns(call.start),
            attributes={**attributes, "raycrew.ranks": len(call.parts)},
        )
        if call.ok is False:
            span.set_status(self._trace.StatusCode.ERROR)
        inside = self._trace.set_span_in_context(span)
        for rank, (began, ended) in call.running().items():
            attributes_of_rank = {**attributes, "raycrew.rank": rank}
            of_rank = self._tracer.start_span(
                f"{call.method} on rank {rank}",
                context=inside,
                start_time=self._ns(began),
                attributes=attributes_of_rank,
            )
            of_rank.end(self._ns(ended))
        span.end(self._ns(end))

    def amended(self, before: Call, after: Call) -> None:
        """The span of a call has ended: a rank that tells of it later is not in it."""

    def span(self, span: Span) -> None:
        """Make a span of something else."""
        if not self._are_wanted():
            return
        attributes = {"raycrew.track": span.track, "raycrew.row": span.row, "raycrew.kind": span.kind}
        made = self._tracer.start_span(
            span.name, start_time=self._ns(span.start), attributes={**attributes, **span.detail}
        )
        made.end(self._ns(span.end))

    def count(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Counts are no spans."""

    def look(self, open_calls: Mapping[str, int]) -> None:
        """Nor is what is open."""

    def _are_wanted(self) -> bool:
        """Whether somebody has said where spans go."""
        return not isinstance(self._trace.get_tracer_provider(), self._trace.ProxyTracerProvider)

    def _ns(self, at: float) -> int:
        return int((at + self._epoch_s) * 1e9)
