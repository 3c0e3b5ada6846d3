"""Waiting in tests for what can't be awaited."""

import contextlib
import pathlib
import time

import psutil

PATIENCE_S = 60


def eventually(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.02)


def is_running(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def read_pids(folder):
    return [int(path.name) for path in pathlib.Path(folder).iterdir()]
