"""Joining through a `ray://` proxy that is too slow at first, or fails in another way; without Ray."""

from types import SimpleNamespace

import pytest

from raycrew.cluster_core import ClusterUnreachableError, _ray, init_ray
from raycrew.cluster_core._connection import init

pytestmark = [pytest.mark.hostile, pytest.mark.smoke]
TOO_SLOW = "Initialization failure from server:\nRuntimeError: Starting Ray client server failed. See x.err"


class Connected(SimpleNamespace):
    """A connection that asks Ray for nothing."""

    @staticmethod
    def current():
        return None


@pytest.fixture
def joining(monkeypatch):
    """Joins that end as a list of outcomes says, which they use up."""
    outcomes = []

    def join(**_options):
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome, {}

    answers = lambda *_: None  # noqa: E731
    for name in ("check_reachable", "check_proxy_answers"):
        monkeypatch.setattr(init, name, answers)
    monkeypatch.setattr(_ray, "check_cluster_answers", answers)
    monkeypatch.setattr(_ray, "init", join)
    monkeypatch.setattr(_ray.Session, "current", lambda: None)
    monkeypatch.setattr(init, "RayConnection", Connected)
    return outcomes


JOINED = SimpleNamespace(dashboard_url=None)


def test_a_proxy_that_was_too_slow_is_tried_again(joining, caplog):
    joining += [ConnectionAbortedError(TOO_SLOW), ConnectionAbortedError(TOO_SLOW), JOINED]
    assert init_ray("ray://far:10001").address == "ray://far:10001"
    assert not joining
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line[:13] for line in said] == ["try 1 of 3 to", "try 2 of 3 to"]
    assert all("ray://far:10001" in line and "Starting Ray client server failed" in line for line in said)


def test_a_proxy_that_stays_too_slow_is_given_up(joining):
    joining += [ConnectionAbortedError(TOO_SLOW)] * 3 + [JOINED]
    with pytest.raises(ClusterUnreachableError, match="Starting Ray client server failed"):
        init_ray("ray://far:10001")
    assert joining == [JOINED]


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("ray://far:10001", ConnectionError("ray client connection timeout")),
        ("far:6379", ConnectionAbortedError(TOO_SLOW)),
    ],
)
def test_every_other_failure_is_told_at_once(joining, address, error):
    joining += [error, JOINED]
    with pytest.raises(ClusterUnreachableError, match=f"joining {address} failed"):
        init_ray(address)
    assert joining == [JOINED]
