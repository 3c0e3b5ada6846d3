"""Answers that come at the very end of the time for them."""

from concurrent.futures import Future

import pytest

from raycrew.tensor_transport.errors import TransportTimeoutError
from raycrew.tensor_transport.process_groups import Invitation
from raycrew.tensor_transport.process_groups._join import _awaited
from raycrew.tensor_transport.process_groups._process import Deadline, Gate

pytestmark = pytest.mark.hostile

INVITATION = Invitation("weights", 1, 0, ("only",), "127.0.0.1", 1, "gloo", "token")


class Late(Future):
    """Settled when whoever waits for it has just given up."""

    def __init__(self, settle):
        super().__init__()
        self._settle = settle

    def result(self, timeout=None):
        settle, self._settle = self._settle, None
        if settle is None:
            return super().result(timeout)
        settle(self)
        raise TimeoutError


def waits():
    gate = Gate("the store")

    def run(future):
        gate.submit = lambda _: future
        return gate.run(print, 1.0)

    yield run
    yield lambda future: _awaited(future, lambda: None, Deadline(60), INVITATION, None)
    gate.close()


def test_what_comes_at_the_last_moment_has_come():
    for wait in waits():
        assert wait(Late(lambda future: future.set_result("here"))) == "here"
        with pytest.raises(TransportTimeoutError, match="its own"):
            wait(Late(lambda future: future.set_exception(TransportTimeoutError("its own"))))
