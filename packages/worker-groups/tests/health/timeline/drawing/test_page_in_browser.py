"""The page of a timeline, in a real browser."""

import re
import shutil
import subprocess

import pytest

from raycrew.worker_groups._health.observers import Span
from raycrew.worker_groups._health.timeline.drawing.page import page_of
from raycrew.worker_groups._health.timeline.drawing.statistics import statistics_of
from raycrew.worker_groups._health.timeline.records import Call, Part, spans_of

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="no chromium here: a page is drawn by a browser")
def test_a_browser_draws_all_rows_and_fills_the_tables(tmp_path):
    calls = [
        Call("policy", "train", i, (Part(0, i + 0.1, i + 0.5), Part(1, i + 0.1, i + 0.9)), i + 1.0, True)
        for i in range(20)
    ]
    spans = [span for call in calls for span in spans_of(call)]
    spans.append(Span("driver", "main", "</script><b id=evil>é</b>", "step", 0.0, 20.0))
    page = tmp_path / "run.html"
    page.write_text(page_of(spans, statistics_of(calls), {"dropped": 7, "began": "now"}))
    command = (
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--window-size=1200,800",
        "--dump-dom", page.as_uri(),
    )  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    body = re.search(r"<body[^>]*>", shown)
    assert body is not None
    drawn = {name: int(value) for name, value in re.findall(r'data-(\w+)="(\d+)"', body[0])}
    assert drawn["bars"] == len(spans)
    assert 0.5 * len(spans) < drawn["drawn"] <= len(spans)
    text = re.sub(r"<script>.*?</script>", "", shown, flags=re.DOTALL)
    for part in ("20 calls", "7 were dropped", ">policy<", ">policy.train<", ">rank 1<", ">20<"):
        assert part in text, part
    shares = [float(share) for share in re.findall(r"([\d.]+) %</td>", text)]
    assert len(shares) == 3
    assert abs(sum(shares) - 100) < 0.2
    assert 'id="evil"' not in shown
