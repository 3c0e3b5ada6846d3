"""Counters and histograms of calls: what is counted, and that Ray's endpoint and the dashboard have it."""

import json
import multiprocessing
import re
import threading
import time
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from patience import PATIENCE_S, eventually
from timed_workers import Timed

from raycrew.cluster_core import RayVirtualCluster
from raycrew.cluster_core.testing import FakeCluster, connected
from raycrew.worker_groups import RayWorkerGroup, SampleQueue, timeline
from raycrew.worker_groups._health.observers import observed
from raycrew.worker_groups._health.timeline import metrics
from raycrew.worker_groups._health.timeline.metrics import COUNTERS, GAUGES, HISTOGRAMS, RayMetrics, full_name
from raycrew.worker_groups._health.timeline.records import Call, Part
from raycrew.worker_groups.errors import WorkerGroupClosedError
from raycrew.worker_groups.testing import InProcessGroup

DASHBOARD = Path(__file__).parents[5] / "docs/assets/grafana-raycrew.json"
REPORT = SimpleNamespace(
    started_at=1e9,
    total_s=2.0,
    spans=[SimpleNamespace(rank="generator 0", phase="load", start_s=0.5, end_s=1.25)],
    receipts=[SimpleNamespace(size_bytes=300), SimpleNamespace(size_bytes=200)],
)


class Measured:
    """Stands for all of Ray's metrics."""

    def __init__(self):
        self.told = []

    def __call__(self, name):
        return SimpleNamespace(
            inc=lambda value, labels: self.told.append((name, value, labels)),
            observe=lambda value, labels: self.told.append((name, value, labels)),
            set=lambda value, labels: self.told.append((name, value, labels)),
        )


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(metrics, "_made", made := Measured())
    return made.told


def test_what_is_told_of_a_call(measured):
    policy = {"group": "policy", "method": "train"}
    RayMetrics().call(Call("policy", "train", 10.0, (Part(0, 11.0, 13.0), Part(1)), 14.0, False))
    assert measured == [
        ("calls", 1.0, {**policy, "outcome": "failed"}),
        ("call_seconds", 3.0, policy),
        ("running_seconds", 2.0, policy),
        ("queued_seconds", 1.0, policy),
    ]
    measured.clear()
    told, later = (Part(0, 11.0, 13.0), Part(1)), (Part(0, 11.0, 13.0), Part(1, 10.5, 20.0))
    RayMetrics().amended(*(Call("policy", "train", 10.0, parts, 14.0, False) for parts in (told, later)))
    assert measured == [("running_seconds", 9.5, policy), ("queued_seconds", 0.5, policy)]
    measured.clear()
    RayMetrics().call(Call("policy", "train", None, (Part(0, 11.0, 13.0),)))
    assert measured == [("running_seconds", 2.0, policy)]
    measured.clear()
    RayMetrics().call(Call("policy", "train", 10.0, (Part(0),)))
    assert measured == [("calls", 1.0, {**policy, "outcome": "untold"})]


def test_open_calls_are_told_until_there_are_none(measured):
    told = RayMetrics()
    told.look({"policy": 2})
    told.look({})
    assert measured == [("open_calls", 2, {"group": "policy"}), ("open_calls", 0, {"group": "policy"})]
    told = RayMetrics()
    told.call(Call("quick", "train", 10.0, (), 11.0, True))
    measured.clear()
    told.look({})
    assert measured == [("open_calls", 0, {"group": "quick"})], "its calls end between two looks"


class Adder:
    def add(self, a):
        return a

    def wait(self, gate):
        return gate.wait(PATIENCE_S)


def test_two_timelines_count_a_call_once_and_leave_no_group_with_open_calls(measured):
    with (
        InProcessGroup(FakeCluster([1]), Adder, name_prefix="adders") as group,
        timeline(metrics=True, max_spans=0, open_telemetry=False),
    ):
        with timeline(metrics=True, open_telemetry=False) as inner:
            group.call("add", 1).get_results()
        assert inner.statistics().calls == 1
        group.call("add", 2).get_results()
        observed.by.sent(time.monotonic(), "lost", "add", [0], [b"a" * 24])
    assert [told for told in measured if told[0] == "calls" and told[2]["group"] == "adders"] == [
        ("calls", 1.0, {"group": "adders", "method": "add", "outcome": "ok"})
    ] * 2
    open_calls = [(labels["group"], value) for name, value, labels in measured if name == "open_calls"]
    assert ("lost", 1) in open_calls
    assert dict(open_calls)["lost"] == 0, "nobody counts them any more"


def test_workers_that_are_found_stuck_are_counted(measured):
    gate = threading.Event()
    with (
        InProcessGroup(FakeCluster([2]), Adder, name_prefix="adders") as group,
        timeline(metrics=True, max_spans=0, open_telemetry=False),
    ):
        waiting = group.on(ranks=[1]).call("wait", gate)
        eventually(lambda: 1 in group.detect_stuck_workers(0.01), "it does not go on")
        assert [1 in group.detect_stuck_workers(0.01) for _ in range(3)] == [True] * 3, "it is counted once"
        gate.set()
        waiting.get_results()
    assert [told for told in measured if told[0] == "stalls"] == [
        ("stalls", 1.0, {"group": "adders", "rank": "1", "reason": "no_progress"})
    ]


def test_counts_and_updates(measured):
    told = RayMetrics()
    told.count("restarts", {"group": "policy"}, 2)
    told.count("restarts", {"group": "policy"}, 0)
    with timeline(metrics=True, max_spans=0, open_telemetry=False) as run:
        run.add(REPORT)
    assert measured == [
        ("restarts", 2.0, {"group": "policy"}),
        ("update_seconds", 0.75, {"update": "weight update", "phase": "load"}),
        ("update_bytes", 500.0, {"update": "weight update"}),
    ]


def test_nothing_is_drawn_or_counted_after_the_end(measured):
    with timeline(metrics=True, open_telemetry=False) as run:
        late = run.span("late")
        late.__enter__()
    with pytest.raises(WorkerGroupClosedError, match="closed"):
        run.add(REPORT)
    with pytest.raises(WorkerGroupClosedError, match="closed"), run.span("later"):
        pass
    late.__exit__(None, None, None)
    names = [event["name"] for event in run.trace()["traceEvents"] if event["ph"] == "X"]
    assert (names, measured) == ([], [])


def test_what_ends_before_it_began_by_the_clocks_of_two_nodes_took_no_time(measured):
    RayMetrics().update("weights", [("load", -0.25)], 0)
    assert measured == [("update_seconds", 0.0, {"update": "weights", "phase": "load"})]


def test_the_dashboard_asks_for_metrics_that_there_are():
    queries = re.findall(r'"expr": "((?:[^"\\]|\\.)*)"', DASHBOARD.read_text())
    asked = {name for query in queries for name in re.findall(r"ray_(raycrew_\w+)", query)}
    counters = {f"{full_name(name)}_total" for name in COUNTERS}
    histograms = {f"{full_name(name)}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")}
    assert asked <= counters | histograms | set(map(full_name, GAUGES))
    assert {re.sub("_(total|bucket|sum|count)$", "", name) for name in asked} == {
        full_name(name) for name in (*COUNTERS, *HISTOGRAMS, *GAUGES)
    }
    windows = set(re.findall(r"rate\([^\[]*\[([^\]]*)\]", " ".join(queries)))
    assert windows == {"$__rate_interval"}, "whatever time there is between two looks of Prometheus"
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)


def counted(address):
    """What Ray's endpoint shows of three calls, and of three samples of which two are handed out."""
    with (
        connected(address),
        RayVirtualCluster([1], use_gpus=False) as cluster,
        RayWorkerGroup(cluster, Timed, name_prefix="measured") as group,
        SampleQueue.on_ray(["tokens"], name="timed") as queue,
        timeline(metrics=True, max_spans=0) as run,
    ):
        for _ in range(3):
            group.call("clock").get_results()
        queue.put({"tokens": [1, 2, 3]}, version=0)
        with queue.get(2, version=4):
            pass
        run.add(REPORT)
        run.statistics()  # has what is known told
        (node,) = (node for node in ray.nodes() if node["Alive"])
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        shown = ""

        def is_there():
            nonlocal shown
            with urllib.request.urlopen(url, timeout=10) as answer:
                shown = answer.read().decode()
            names = (
                "update_bytes_total",
                "calls_total",
                "running_seconds_bucket",
                "open_calls",
                "samples_total",
            )
            return all(f"ray_raycrew_{name}{{" in shown for name in names)

        eventually(is_there, "Ray's endpoint has the metrics")
        return shown


@pytest.mark.long
def test_rays_endpoint_has_them(local_ray_session):
    """In a process of its own: in one that has connected before Ray counts the same thing several times."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        shown = process.submit(counted, local_ray_session).result(300)
    told = re.findall(r"^ray_raycrew_calls_total\{([^}]*)\} (\S+)", shown, re.MULTILINE)
    (calls,) = ((labels, n) for labels, n in told if 'group="measured"' in labels)
    assert 'method="clock"' in calls[0] and 'outcome="ok"' in calls[0]
    assert float(calls[1]) == 3.0
    told = re.findall(r"^ray_raycrew_samples_total\{([^}]*)\} (\S+)", shown, re.MULTILINE)
    of_queue = {
        re.search(r'what="(\w+)"', labels)[1]: float(n) for labels, n in told if 'queue="timed"' in labels
    }
    assert of_queue == {"produced": 3.0, "handed_out": 2.0, "consumed": 2.0}


def test_limits_of_histograms_rise_from_a_millisecond_to_a_quarter_of_an_hour():
    limits = metrics._SECONDS
    assert limits[0] <= 0.001 and limits[-1] >= 900
    assert all(2 < following / limit < 5 for limit, following in pairwise(limits))


def test_each_metric_is_made_once_with_its_labels_as_ray_is_to_call_it(monkeypatch):
    made = []
    for kind in ("counter", "gauge", "histogram"):
        monkeypatch.setattr(
            metrics, kind, lambda *given, kind=kind: made.append((kind, *given[:3])) or made[-1]
        )
    monkeypatch.setattr(metrics, "_made", cache(metrics._made.__wrapped__))
    all_of = {"counter": COUNTERS, "gauge": GAUGES, "histogram": HISTOGRAMS}
    expected = [(kind, f"raycrew_{name}", *known[name]) for kind, known in all_of.items() for name in known]
    names = [name for known in all_of.values() for name in known]
    assert [metrics._made(name) for name in names] == expected
    assert [metrics._made(name) for name in names] == made == expected
