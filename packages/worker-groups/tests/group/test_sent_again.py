"""Calls of idempotent methods that are sent again after their worker died; no Ray is needed."""

import threading
from types import SimpleNamespace

import pytest
from patience import PATIENCE_S, eventually
from workers import Worker

from raycrew.worker_groups import (
    GroupResizedError,
    RayWorkerGroup,
    WorkerFailureError,
    WorkerGroupClosedError,
)
from raycrew.worker_groups._calls import GroupShape, Recovery, dispatch_single
from raycrew.worker_groups._group.life.states import Lifecycle
from raycrew.worker_groups._worker.worker_class import describe_class

DISPATCH = dispatch_single(GroupShape(describe_class(Worker, {}), 2, [[0], [1]]), "add", (1,), {})

pytestmark = pytest.mark.hostile


class Group(SimpleNamespace):
    """A group that notes with which size it was found when a call was sent."""

    def __init__(self):
        super().__init__(_life=Lifecycle("policy", "open"), size=2, sent=[])

    def _send_to_actors(self, dispatch, timeout):
        dispatch.check_size(self.size, "policy")
        self.sent.append(self.size)


def test_what_is_sent_again_waits_for_the_next_restart_and_is_not_sent_to_others():
    group, is_begun, may_end = Group(), threading.Event(), threading.Event()

    def shrink():
        group._life.replacing([0, 1])
        is_begun.set()
        assert may_end.wait(PATIENCE_S)
        group.size = 1
        return []

    changing = threading.Thread(target=group._life.restart, args=(shrink, "resize"), daemon=True)
    changing.start()
    assert is_begun.wait(PATIENCE_S)
    errors = []

    def send_again():
        with pytest.raises(GroupResizedError, match="may have run; it is not sent again") as error:
            RayWorkerGroup._send_again(group, DISPATCH)
        errors.append(error)

    sending = threading.Thread(target=send_again, daemon=True)
    sending.start()
    sending.join(0.2)
    assert (sending.is_alive(), group.sent) == (True, [])
    may_end.set()
    eventually(lambda: errors, "it was refused")
    assert group.sent == []


def test_what_can_not_be_sent_again_as_its_group_ends_is_told_with_what_became_of_it():
    def closed():
        raise WorkerGroupClosedError("worker group 'policy' was shut down")

    died = WorkerFailureError("it died")
    assert Recovery(lambda error: True, closed).after(died, lambda: True) is None
    assert died.__notes__ == [
        "its group was restarted; this call was not sent again: worker group 'policy' was shut down"
    ]
