"""The timeline of a run: what users hold."""

import json
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Protocol, Self

from raycrew.worker_groups._health.observers import Span
from raycrew.worker_groups._health.timeline.drawing import (
    TimelineStatistics,
    page_of,
    statistics_of,
    trace_of,
)
from raycrew.worker_groups._health.timeline.files import files_to_write, write
from raycrew.worker_groups._health.timeline.kept import Kept
from raycrew.worker_groups._health.timeline.metrics import RayMetrics
from raycrew.worker_groups._health.timeline.records import DRIVER
from raycrew.worker_groups._health.timeline.shared import Losses, Subscription
from raycrew.worker_groups._health.timeline.telemetry import OpenTelemetrySpans, is_installed
from raycrew.worker_groups.errors import WorkerGroupClosedError


class TimedPhase(Protocol):
    """A phase of something that was timed, as `WeightSyncReport` has them; seconds from its start."""

    @property
    def rank(self) -> str:
        """Whose it was."""
        ...

    @property
    def phase(self) -> str:
        """What was done."""
        ...

    @property
    def start_s(self) -> float:
        """When it began."""
        ...

    @property
    def end_s(self) -> float:
        """When it was over."""
        ...


class TimedReport(Protocol):
    """What says of itself when it was, and what was done when: `WeightSyncReport` is one."""

    @property
    def started_at(self) -> float:
        """Seconds since the epoch."""
        ...

    @property
    def total_s(self) -> float:
        """How long it took."""
        ...

    @property
    def spans(self) -> Sequence[TimedPhase]:
        """Its phases."""
        ...


class Timeline:
    """What a run does when, from the moment that this is made until it is closed; made by `timeline`."""

    def __init__(
        self,
        trace: str | os.PathLike[str] | None,
        html: str | os.PathLike[str] | None,
        max_spans: int,
        metrics: RayMetrics | None,
        spans: OpenTelemetrySpans | None,
    ) -> None:
        self._trace, self._html = files_to_write(trace=trace, html=html)
        self._began_s = time.time()
        self._kept, self._metrics, self._spans = Kept(max_spans, weakref.ref(self)), metrics, spans
        listeners = (self._kept if max_spans else None, metrics, spans)
        self._is_open, self._keeps = True, max_spans > 0
        self._is_closed, self._closing = False, threading.RLock()
        self._pid, self._losses = os.getpid(), Losses()
        self._subscription = Subscription([listener for listener in listeners if listener is not None])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Timeline({'recording' if self._is_open else f'{len(self._kept)} calls, closed'})"

    def close(self) -> None:
        """Stop recording, and write the files; once they are written, a second time does nothing.

        Nor does a forked process, whose parent records on.

        Raises:
            OSError: A file can't be written; what was recorded can still be asked for.
        """
        if os.getpid() != self._pid:  # what may hold the lock is not there
            return
        with self._closing:
            if self._is_closed:
                return
            try:
                self._losses = self._subscription.end()
            finally:
                self._is_open = False
                self._write()
            self._is_closed = True

    def _write(self) -> None:
        try:
            if self._trace is not None:
                write(self._trace, json.dumps(self.trace(), separators=(",", ":"), allow_nan=False))
        finally:  # one that can't be written does not keep the other from being
            if self._html is not None:
                write(self._html, self.html())

    @contextmanager
    def span(self, name: str, row: str = "main") -> Iterator[None]:
        """Draw what runs in here, as a bar of the driver's.

        Args:
            name: What it is called.
            row: The row that it is drawn in.

        Raises:
            WorkerGroupClosedError: The timeline is closed; one that is closed meanwhile does without it.
        """
        self._check_open()
        start = time.monotonic()
        try:
            yield
        finally:
            if self._is_open:
                self._keep(Span(DRIVER, row, name, "step", start, time.monotonic()))

    def add(self, report: TimedReport, name: str = "weight update") -> None:
        """Draw what was timed elsewhere: a `WeightSyncReport`, say, with what each rank did when.

        Best at once: where the clock of this machine is set meanwhile, it is drawn at another time.

        Args:
            report: It has `started_at`, `total_s` and `spans`.
            name: What the whole of it is called.

        Raises:
            TypeError: It has not.
            WorkerGroupClosedError: The timeline is closed.
        """
        self._check_open()
        if missing := [part for part in ("started_at", "total_s", "spans") if not hasattr(report, part)]:
            raise TypeError(f"{type(report).__name__} has no {', '.join(missing)}, so it can't be drawn")
        start = report.started_at - time.time() + time.monotonic()  # of now: the clock may have been set
        self._keep(Span(name, "", name, "whole", start, start + max(0.0, report.total_s)))
        for phase in report.spans:
            began, ended = start + phase.start_s, start + max(phase.start_s, phase.end_s)
            self._keep(Span(name, phase.rank, phase.phase, phase.phase, began, ended))
        if self._metrics is not None:
            phases = [(phase.phase, phase.end_s - phase.start_s) for phase in report.spans]
            receipts = getattr(report, "receipts", ())
            self._metrics.update(name, phases, sum(receipt.size_bytes for receipt in receipts))

    def _check_open(self) -> None:
        if not self._is_open:
            raise WorkerGroupClosedError("this timeline is closed, and records nothing more")

    def _keep(self, span: Span) -> None:
        if self._keeps:
            self._kept.span(span)
        if self._spans is not None:
            self._spans.span(span)

    # What was recorded.

    @property
    def dropped(self) -> int:
        """How many calls and spans are missing because there were too many, as far as is known by now."""
        return self._kept.dropped + self._losses.calls

    def statistics(self) -> TimelineStatistics:
        """How idle each group was, and which ranks were the slowest, of what is recorded by now."""
        self._look()
        return statistics_of(self._kept.calls())

    def trace(self) -> dict[str, Any]:
        """The trace of what is recorded by now, as Perfetto and Chrome read it."""
        self._look()
        return trace_of(self._kept.spans(), self._about())

    def html(self) -> str:
        """The page of what is recorded by now."""
        self._look()
        return page_of(self._kept.spans(), self.statistics(), self._about())

    def _look(self) -> None:
        if self._is_open and os.getpid() == self._pid:
            self._subscription.look()
            self._losses = self._subscription.losses()

    def _about(self) -> dict[str, Any]:
        began = datetime.fromtimestamp(self._began_s, UTC)
        bounds = {node[:8]: f"{1e3 * s:.3f} ms" for node, s in sorted(self._losses.bounds_s.items())}
        return {
            "began": began.isoformat(timespec="milliseconds"),
            "driver": os.getpid(),
            "dropped": self.dropped,
            "clocks of nodes, right within": bounds,
        }


def timeline(
    trace: str | os.PathLike[str] | None = None,
    *,
    html: str | os.PathLike[str] | None = None,
    metrics: bool = False,
    open_telemetry: bool | None = None,
    max_spans: int = 200_000,
) -> Timeline:
    """Record from now on what this process has its workers do, and when.

    Recorded are the calls of all groups, handles and balancers of this process, with the time that they were
    queued, ran and waited for slower ranks on each rank; batches of `fan_out`; starts and restarts of groups.
    Other processes' calls of the same workers are there as far as they ran. Use it in a `with` block, or
    close it.

    Args:
        trace: File to write a trace to in the end, which https://ui.perfetto.dev and chrome://tracing read.
        html: File to write a page to in the end, which any browser shows, without a network.
        metrics: Whether to count calls and what they take in the Prometheus endpoint of Ray's nodes, too.
        open_telemetry: Whether to make spans of OpenTelemetry, too; None where its API is installed.
        max_spans: How many spans are kept; what is more is counted, and left out. With 0 none are, as for
            metrics alone.

    Raises:
        OSError: A file can't be written there: nothing may be, or there is no such folder.
        ImportError: `open_telemetry` is asked for, and its API is not installed.
        ValueError: What is there is a folder, a device or anything else but a file; both files are one; or
            `max_spans` is below 0, or is 0 and there is a file to write.
    """
    if max_spans < 0 or (max_spans == 0 and (trace is not None or html is not None)):
        raise ValueError(f"max_spans must be at least 1 for a file to write, else 0; it is {max_spans}")
    wants_spans = is_installed() if open_telemetry is None else open_telemetry
    spans = OpenTelemetrySpans() if wants_spans else None
    return Timeline(trace, html, max_spans, RayMetrics() if metrics else None, spans)
