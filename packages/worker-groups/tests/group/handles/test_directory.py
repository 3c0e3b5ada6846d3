import threading
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from patience import PATIENCE_S
from ray.exceptions import ActorDiedError, ActorUnavailableError

from raycrew.cluster_core import ClusterClosedError
from raycrew.worker_groups import WorkerGroupClosedError
from raycrew.worker_groups._group import actors
from raycrew.worker_groups._group.actors import Actors
from raycrew.worker_groups._group.handles import Directory, directory
from raycrew.worker_groups._health import Ended, Publication

pytestmark = pytest.mark.hostile


class Ray:
    """What a directory asks of Ray."""

    def __init__(self):
        self.started, self.ended, self.told = 0, [], []
        self.outcome = self.on_start = None

    while_connected = nullcontext

    def get(self, ref, timeout=None):
        if isinstance(self.outcome, Exception):
            raise self.outcome

    def start_actor(self, remote, options, arguments):
        self.started += 1
        if self.on_start is not None:
            self.on_start()
        return SimpleNamespace(replace=SimpleNamespace(remote=self.told.append))


@pytest.fixture
def ray(monkeypatch):
    ray = Ray()
    monkeypatch.setattr(directory, "current_session", lambda: ray)
    monkeypatch.setattr(directory, "start_actor", ray.start_actor)
    monkeypatch.setattr(directory, "end_actors", ray.ended.extend)
    monkeypatch.setattr(directory, "own_node", lambda: ("ab" * 28, "127.0.0.1"))
    monkeypatch.setattr(directory, "own_namespace", lambda: "namespace")
    monkeypatch.setattr(directory, "is_behind_proxy", lambda: False)
    return ray


def in_time(fn):
    """What a function gives or raises, unless it waits for ever."""
    outcome = Future()

    def run():
        try:
            outcome.set_result(fn())
        except Exception as error:  # noqa: BLE001
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome.result(PATIENCE_S)


def refused():
    raise ValueError("the name is taken")


@pytest.mark.parametrize(
    ("outcome", "on_start", "started"),
    [
        (ActorUnavailableError("not now", None), refused, 1),
        (ActorDiedError(), refused, 2),
        (ActorDiedError(), None, 2),
        (ClusterClosedError("the connection has ended"), None, 1),
    ],
)
def test_a_restart_does_not_fail_of_a_directory_that_can_not_be_told(ray, outcome, on_start, started):
    members = Directory("policy")
    members.open(lambda: "generation 0")
    ray.outcome, ray.on_start = outcome, on_start
    members.publish(lambda: "generation 1")
    assert (ray.started, ray.told) == (started, ["generation 1"])


def test_a_directory_that_was_lost_is_made_anew_for_the_next_handle(ray):
    members = Directory("policy")
    first, _ = members.open(lambda: "generation 0")
    ray.outcome = ActorDiedError()
    assert members.open(lambda: "generation 0") == (first, "generation 0")
    assert ray.started == 2


def test_who_ends_a_group_waits_for_nobody_that_it_has_interrupted(ray):
    members = Directory("policy")
    ray.on_start = members.end  # as a signal handler does in the thread that asks for a handle
    with pytest.raises(WorkerGroupClosedError, match="'policy' was shut down"):
        in_time(lambda: members.open(lambda: "generation 0"))
    assert len(ray.ended) == 1
    members.publish(lambda: "generation 1")
    assert (ray.started, ray.told) == (1, [])


def test_workers_are_ended_before_what_knows_them(monkeypatch):
    order = []

    def end_workers(*_):
        order.append("workers")
        return Ended()

    monkeypatch.setattr(actors, "end_workers_of", end_workers)
    monkeypatch.setattr(actors.Session, "current", lambda: None)
    who = SimpleNamespace(end=lambda: order.append("directory"))
    Actors("policy", None, [], [], None, who, Publication()).end(1.0, force=True)
    assert order == ["workers", "directory"]
