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


@contextlib.contextmanager
def within(seconds):
    """Far above what it takes, and far below what it took when somebody waited for the wrong thing."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds, f"took {took:.1f} s, not below {seconds} s"


def is_running(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def read_pids(folder):
    return [int(path.name) for path in pathlib.Path(folder).iterdir()]
