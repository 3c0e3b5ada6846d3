"""Joining through a `ray://` proxy whose server does not come up, or that fails otherwise."""

import inspect
from types import SimpleNamespace

import pytest

from raycrew.cluster_core import ClusterUnreachableError, _ray, init_ray
from raycrew.cluster_core._connection import init, proxy
from raycrew.cluster_core._connection.proxy import NO_SERVER

pytestmark = [pytest.mark.hostile, pytest.mark.smoke]
FAILURES = [f"Initialization failure from server:\nRuntimeError: {words}!" for words in NO_SERVER]
ENDED = FAILURES[0]


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

    monkeypatch.setattr(proxy, "_PAUSE_S", 0.0)
    answers = lambda *_: None  # noqa: E731
    for name in ("check_reachable", "check_proxy_answers"):
        monkeypatch.setattr(init, name, answers)
    monkeypatch.setattr(_ray, "check_cluster_answers", answers)
    monkeypatch.setattr(_ray, "init", join)
    monkeypatch.setattr(_ray.Session, "current", lambda: None)
    monkeypatch.setattr(init, "RayConnection", Connected)
    return outcomes


JOINED = SimpleNamespace(dashboard_url=None)


def test_the_words_are_those_of_ray():
    pytest.importorskip("grpc", reason="Ray's client is not installed")
    from ray.util.client.server import proxier

    assert all(words in inspect.getsource(proxier) for words in NO_SERVER)


@pytest.mark.parametrize("failure", FAILURES, ids=NO_SERVER)
def test_a_proxy_whose_server_did_not_come_up_is_tried_again(joining, caplog, failure):
    joining += [ConnectionAbortedError(failure), ConnectionAbortedError(failure), JOINED]
    assert init_ray("ray://far:10001").address == "ray://far:10001"
    assert not joining
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line[:13] for line in said] == ["try 1 of 3 to", "try 2 of 3 to"]
    assert all("ray://far:10001" in line and failure in line for line in said)


def test_a_proxy_whose_server_never_comes_up_is_given_up(joining):
    joining += [ConnectionAbortedError(ENDED)] * 3 + [JOINED]
    with pytest.raises(ClusterUnreachableError, match="Starting Ray client server failed"):
        init_ray("ray://far:10001")
    assert joining == [JOINED]


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("ray://far:10001", ConnectionError("ray client connection timeout")),
        ("far:6379", ConnectionAbortedError(ENDED)),
    ],
)
def test_every_other_failure_is_told_at_once(joining, address, error):
    joining += [error, JOINED]
    with pytest.raises(ClusterUnreachableError, match=f"joining {address} failed"):
        init_ray(address)
    assert joining == [JOINED]
