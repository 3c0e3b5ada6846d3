"""How long a receiver waits for what a directory decides."""

import math
import time

import pytest
import torch

from raycrew.tensor_transport.errors import TransportTimeoutError, UpdateAbortedError
from raycrew.tensor_transport.testing import InProcessByteStore
from raycrew.tensor_transport.weights import WeightUpdate
from raycrew.tensor_transport.weights._directory import Record
from raycrew.tensor_transport.weights._receiving.member import Member


class Silent:
    """A directory that decides nothing by itself; who waits too long may give a version up."""

    def __init__(self, *, gives_up):
        self.gives_up, self.waited = gives_up, []

    def say_and_wait(self, vote, outcome, left, *told):
        self.waited.append(left)
        raise TransportTimeoutError("no decision")

    def ask(self, method, *arguments):
        return self.gives_up if method is Record.abort else "rank 1 was late"


def test_a_receiver_waits_until_its_deadline_and_no_longer():
    directory = Silent(gives_up=True)
    member = Member(directory, "generator-0")
    for deadline, most in ((time.monotonic() + 60, 60.0), (time.monotonic() - 60, 0.0), (None, None)):
        with pytest.raises(UpdateAbortedError, match="version 3 was given up: rank 1 was late"):
            member.hear(3, deadline, InProcessByteStore())
        left = directory.waited.pop()
        assert left == most if not most else math.isclose(left, most, abs_tol=30)


def test_what_was_committed_meanwhile_holds_though_the_receiver_was_late():
    Member(Silent(gives_up=False), "generator-0").hear(3, time.monotonic(), InProcessByteStore())


class Heard(Silent):
    """Hears what it is told."""

    def __init__(self):
        self.told = []

    def ask(self, method, *arguments):
        self.told.append((method, *arguments))
        return []


@pytest.mark.hostile
def test_what_a_receiver_has_not_is_told_where_it_is_a_version_of_a_directory():
    directory, update = Heard(), WeightUpdate("me", 3, (), ())
    Member(directory, "rank 1").refuse(3, RuntimeError("no room"))
    assert directory.told == [(Record.vote, 3, "rank 1", False, "RuntimeError('no room')")]
    Member(directory, "rank 1").refuse(update, RuntimeError("no room"))
    Member(None, "rank 1").refuse(3, RuntimeError("no room"))
    assert len(directory.told) == 1, "of others a directory knows nothing"


def test_what_nobody_needs_once_a_version_counts_is_released_when_it_is_held():
    class Deciding(Silent):
        def say_and_wait(self, vote, outcome, left, *told):
            assert (outcome, told) == (Record.outcome, (3, store.release_scope, "rank 1"))
            return "committed", [old]

    store = InProcessByteStore()
    old = store.put(torch.zeros(4, dtype=torch.uint8).numpy())
    member = Member(Deciding(gives_up=False), "rank 1")
    member.hear(3, None, store)
    assert old in store.held, "it may be what is returned to"
    member.hold(3, store, is_known=True)
    assert not store.held


@pytest.mark.parametrize("is_known", [False, True])
def test_what_a_receiver_holds_is_told_unless_its_vote_did(is_known):
    directory = Heard()
    Member(directory, "rank 1").hold(3, InProcessByteStore(), is_known=is_known)
    assert ((Record.hold, "rank 1", 3) in directory.told) is not is_known
    Member(None, "rank 1").hold(3, InProcessByteStore(), is_known=is_known)


def test_a_receiver_comes_and_goes_under_its_name():
    directory = Heard()
    for member in (Member(directory, "rank 1"), Member(None, "rank 1")):
        member.arrive()
        member.leave()
    assert directory.told == [(Record.arrive, "rank 1"), (Record.leave, "rank 1")]
    with pytest.raises(ValueError, match="in a directory"):
        Member(None, "rank 1").feed(3)
