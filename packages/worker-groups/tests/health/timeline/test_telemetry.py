"""Calls as spans of OpenTelemetry, by its real SDK."""

import sys
import time
from types import SimpleNamespace

import pytest

from raycrew.cluster_core.testing import FakeCluster
from raycrew.worker_groups import timeline
from raycrew.worker_groups._health.observers import Span, observed
from raycrew.worker_groups._health.timeline import telemetry
from raycrew.worker_groups._health.timeline.records import Call, Part
from raycrew.worker_groups.testing import InProcessGroup


class Adder:
    def add(self, a):
        return a + 1

    def fail(self):
        raise ValueError("s3cret")


@pytest.fixture
def exported(monkeypatch):
    """A tracer's spans, in the order of their ends."""
    pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry's SDK is not installed")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter, provider.get_tracer("program")


def test_a_call_is_a_span_within_that_of_its_caller(exported):
    exporter, tracer = exported
    with (
        InProcessGroup(FakeCluster([2]), Adder, name_prefix="adders") as group,
        timeline(max_spans=0),
        timeline(max_spans=0) as run,
    ):
        with tracer.start_as_current_span("step") as step:
            group.call("add", 1).get_results()
        with pytest.raises(Exception, match="s3cret"):
            group.call("fail").get_results()
        with run.span("think"):
            pass
    finished = exporter.get_finished_spans()
    spans = {span.name: span for span in finished}
    assert len(spans) == len(finished), "each once, whoever records"
    call, part = spans["adders.add"], spans["add on rank 1"]
    assert call.parent.span_id == step.get_span_context().span_id
    assert part.parent.span_id == call.context.span_id
    assert call.start_time <= part.start_time <= part.end_time <= call.end_time
    assert abs(call.start_time - spans["step"].start_time) < 60e9, "seconds since the epoch"
    assert dict(part.attributes) == {"raycrew.group": "adders", "raycrew.method": "add", "raycrew.rank": 1}
    assert spans["adders.fail"].status.status_code.name == "ERROR"
    assert call.status.status_code.name == "UNSET"
    assert spans["adders.fail"].parent is None
    assert spans["think"].attributes["raycrew.kind"] == "step"
    assert "s3cret" not in "".join(span.to_json() for span in spans.values())
    assert run.statistics().calls == 0, "nothing is kept"


def test_without_it_nothing_is_made_unless_that_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with timeline(max_spans=0):
        pass
    with pytest.raises(ImportError, match="opentelemetry-api"):
        timeline(open_telemetry=True)
    assert observed.by is None
    assert not telemetry.is_installed()


def test_spans_have_the_times_of_what_they_are_of(exported):
    exporter, _ = exported
    began, spans = time.monotonic() - 100, telemetry.OpenTelemetrySpans()
    spans.call(Call("g", "m", began, (Part(0, began + 1, began + 3),), began + 4, True))
    spans.span(Span("t", "r", "think", "step", began + 10, began + 12))
    epoch_s = time.time() - (time.monotonic() - began)
    told = {span.name: (span.start_time / 1e9, span.end_time / 1e9) for span in exporter.get_finished_spans()}
    for name, times in {"g.m": (0, 4), "m on rank 0": (1, 3), "think": (10, 12)}.items():
        assert told[name] == pytest.approx([epoch_s + at for at in times], rel=0, abs=0.5)
    spans.call(Call("g", "m", None, (Part(0),)))
    assert len(exporter.get_finished_spans()) == 3, "of what nothing is known there is none"


def test_no_span_is_made_while_nobody_has_said_where_spans_go(monkeypatch):
    trace = pytest.importorskip("opentelemetry.trace", reason="OpenTelemetry's API is not installed")
    made, provider = [], trace.ProxyTracerProvider()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    spans = telemetry.OpenTelemetrySpans()
    monkeypatch.setattr(spans, "_tracer", SimpleNamespace(start_span=lambda name, **_: made.append(name)))
    spans.call(Call("g", "m", 0.0, (Part(0, 1.0, 3.0),), 4.0, True))
    spans.span(Span("t", "r", "think", "step", 0.0, 1.0))
    assert made == []
