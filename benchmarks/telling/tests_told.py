"""A plug-in of pytest that says what became of each test at once, and writes it down: `pytest -p tests_told`.

The file that `TESTS_TOLD` names has a line of JSON for whatever is known of a test, the last of which counts.
What has passed there already is left out. Standard library and pytest only.
"""

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

_WHY_CHARACTERS = 2000


def read(path: Path) -> dict[str, dict[str, Any]]:
    """What became of each test: its outcome ("begun" where it did not end), its seconds, and why."""
    lines = path.read_text().splitlines() if path.exists() else []
    told: dict[str, dict[str, Any]] = {}
    for line in lines:
        with contextlib.suppress(ValueError):  # One that is being written, or was when all ended.
            found = json.loads(line)
            told[found.pop("test")] = found
    return told


class Telling:
    """Writes lines.

    Args:
        path: Where to.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._known = path, read(path)
        self._began: dict[str, float] = {}
        self._bad: set[str] = set()
        self._is_first = True  # The last line of a run before may have no end.

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what has passed."""
        passed = {test for test, found in self._known.items() if found["outcome"] == "passed"}
        left_out = [item for item in items if item.nodeid in passed]
        if left_out:
            items[:] = [item for item in items if item.nodeid not in passed]
            config.hook.pytest_deselected(items=left_out)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file was read: one that can't be is told as a test that failed is."""
        if report.failed:
            self._tell(report.nodeid, "failed", report.longreprtext)
        elif report.nodeid in self._known:
            self._tell(report.nodeid, "passed")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """It begins: the last that is known of it if all ends here."""
        self._began[nodeid] = time.monotonic()
        self._tell(nodeid, "begun")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One of its phases has ended."""
        if report.failed and report.nodeid not in self._bad:
            self._bad.add(report.nodeid)
            self._tell(report.nodeid, "failed", report.longreprtext)
        elif report.skipped:
            self._bad.add(report.nodeid)
            self._tell(report.nodeid, "skipped", report.longreprtext)
        elif report.when == "teardown" and report.nodeid not in self._bad:
            self._tell(report.nodeid, "passed")

    def _tell(self, test: str, outcome: str, why: str = "") -> None:
        now = time.monotonic()
        seconds = round(now - self._began.get(test, now), 1)
        line: Mapping[str, Any] = {
            "test": test,
            "outcome": outcome,
            "seconds": seconds,
            "why": why[-_WHY_CHARACTERS:],
        }
        with self._path.open("a") as file:
            file.write("\n" * self._is_first + json.dumps(line) + "\n")
        self._is_first = False
        if why:
            print(f"\n{outcome}: {test} after {seconds} s\n{why}", flush=True)


def pytest_configure(config: pytest.Config) -> None:
    """Where a file is named."""
    if path := os.environ.get("TESTS_TOLD"):
        config.pluginmanager.register(Telling(Path(path)), "telling")
