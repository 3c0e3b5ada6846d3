"""How long a receiver waits for what a directory decides."""

import math
import time

import pytest

from raycrew.tensor_transport.errors import TransportTimeoutError, UpdateAbortedError
from raycrew.tensor_transport.weights._directory import Record
from raycrew.tensor_transport.weights._receiving.member import Member


class Silent:
    """A directory that decides nothing by itself; who waits too long may give a version up."""

    def __init__(self, *, gives_up):
        self.gives_up, self.waited = gives_up, []

    def say_and_wait(self, vote, decision, left, version):
        self.waited.append(left)
        raise TransportTimeoutError("no decision")

    def ask(self, method, *arguments):
        return self.gives_up if method is Record.abort else "rank 1 was late"


def test_a_receiver_waits_until_its_deadline_and_no_longer():
    directory = Silent(gives_up=True)
    member = Member(directory, "generator-0")
    for deadline, most in ((time.monotonic() + 60, 60.0), (time.monotonic() - 60, 0.0), (None, None)):
        with pytest.raises(UpdateAbortedError, match="version 3 was given up: rank 1 was late"):
            member.hear(3, deadline)
        left = directory.waited.pop()
        assert left is most if most is None else math.isclose(left, most, abs_tol=30)


def test_what_was_committed_meanwhile_holds_though_the_receiver_was_late():
    Member(Silent(gives_up=False), "generator-0").hear(3, time.monotonic())
