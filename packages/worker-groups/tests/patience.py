"""Waiting in tests for what can't be awaited."""

import contextlib
import pathlib
import time

import psutil

PATIENCE_S = 120  # far above what anything takes, also on a busy machine
LEAST_LOOKS = 3


def eventually(condition, what):
    """A look that takes all the time itself, as a question with a deadline may, is not the last one."""
    deadline, looks = time.monotonic() + PATIENCE_S, 1
    while not condition():
        assert looks < LEAST_LOOKS or time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        looks += 1
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
