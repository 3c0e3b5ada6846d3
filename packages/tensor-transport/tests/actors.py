"""The ends of actors."""

import time

import pytest

ray = pytest.importorskip("ray")


def wait_for_end(call):
    """Until an actor that was killed answers no more: `ray.kill` returns before that."""
    deadline = time.monotonic() + 120
    with pytest.raises(ray.exceptions.ActorDiedError):
        while time.monotonic() < deadline:
            ray.get(call(), timeout=60)
