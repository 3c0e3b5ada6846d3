"""The suite of transports sees each of these faults: it would not be worth much otherwise."""

import contextlib
import dataclasses
import functools
import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from processes import MakingPeer

from raycrew.tensor_transport.testing import PullCase, nothing_left
from raycrew.tensor_transport.testing._broadcasting.checks import _check_nothing_left
from raycrew.tensor_transport.testing._pulling.case import _check_alone, _check_deaths
from raycrew.tensor_transport.testing._transports import files_left, leaves_nothing
from raycrew.tensor_transport.transports import SharedMemoryTransport, TcpTransport
from raycrew.tensor_transport.transports import _pulling as base


class Shifted(SharedMemoryTransport):
    """Reads one byte further on, where there is one."""

    def _move(self, jobs, guard):
        super()._move(jobs, guard)
        for job in jobs:
            job.target[:] = np.roll(job.target, 1)


class Unfolded(SharedMemoryTransport):
    """Does not look at folds."""

    def _move(self, jobs, guard):
        super()._move([_without_fold(job) for job in jobs], guard)


class Leaking(SharedMemoryTransport):
    """Leaves its session behind."""

    def _release(self):
        pass


class Careless(SharedMemoryTransport):
    """Takes buffers and regions of any size."""

    def _target(self, i, region, buffer):
        return np.zeros(region.size_bytes, np.uint8)


class Uncounted(SharedMemoryTransport):
    """Writes to tensors past torch."""

    def _fill(self, jobs, into, guard):
        self._move(jobs, guard)


def _without_fold(job):
    offer = dataclasses.replace(job.offer, fold=None)
    return base.Job(dataclasses.replace(job.region, offer=offer), job.target)


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("broken", "seen"),
    [
        (Shifted, "other bytes"),
        (Unfolded, "damaged bytes are not seen"),
        (Uncounted, "does not know that a tensor was written to"),
        (Careless, "other bytes of an own offer|not refused|other bytes"),
    ],
)
def test_a_fault_is_seen(broken, seen):
    case = PullCase(broken, lambda: None)
    with pytest.raises(AssertionError, match=seen):
        _check_alone(case)


@pytest.mark.hostile
def test_what_is_left_behind_is_seen():
    leaking = []
    with pytest.raises(AssertionError, match=r"left behind: .*raycrew-"), nothing_left(within_s=0.01):
        leaking.append(Leaking())
        leaking[0].close()
    leaking[0]._arenas.close()


class Hoarding(SharedMemoryTransport):
    """Keeps something of each pull."""

    kept = contextlib.ExitStack()

    def _move(self, jobs, guard):
        self.kept.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        super()._move(jobs, guard)


@pytest.mark.hostile
def test_what_is_left_behind_after_a_death_is_seen():
    case = PullCase(Hoarding, lambda: MakingPeer(SharedMemoryTransport))
    with Hoarding.kept, pytest.raises(AssertionError, match=r"left behind: .*/dev/null"):
        _check_deaths(case, within_s=0.1)


class Boasting(TcpTransport):
    """Says that what it offers survives it."""

    @property
    def capabilities(self):
        return dataclasses.replace(super().capabilities, survives_owner=True)


@pytest.mark.hostile
def test_what_does_not_survive_its_owner_as_it_is_said_to_is_seen():
    case = PullCase(Boasting, lambda: MakingPeer(Boasting))
    with pytest.raises(AssertionError, match="is to survive its owner is gone"):
        _check_deaths(case)


@pytest.mark.hostile
def test_a_connection_that_somebody_else_opens_meanwhile_is_not_the_transports():
    with contextlib.ExitStack() as opened:
        ray = [socket.socket()]
        opened.enter_context(ray[0])
        leaves_nothing(lambda: ray and opened.enter_context(ray.pop().dup()), within_s=0.1)
        with pytest.raises(AssertionError, match=r"left behind: .*socket:"):
            leaves_nothing(lambda: opened.enter_context(socket.socket()), within_s=0.1)


def offer_some(transport):
    """Run by a peer."""
    transport.offer(np.ones(10, np.uint8))


@pytest.mark.hostile
def test_files_of_another_process_are_left_behind_once_it_is_gone(folder):
    peer = MakingPeer(functools.partial(SharedMemoryTransport, directory=folder))
    peer.call(offer_some)
    (own,) = Path(folder).iterdir()
    assert len(list(own.iterdir())) == 3 and not files_left(own)
    peer.kill()
    assert sorted(files_left(own)) == sorted(own.iterdir()) != []
    SharedMemoryTransport(directory=folder).close()
    assert not list(own.iterdir())


@pytest.mark.hostile
def test_what_only_a_transport_leaves_counts_the_first_time():
    with contextlib.ExitStack() as opened:
        todo = [Path(os.devnull)]
        with pytest.raises(AssertionError, match=r"left behind: .*/dev/null"):
            leaves_nothing(lambda: todo and opened.enter_context(todo.pop().open()), within_s=0.1)
        ended = threading.Event()
        opened.callback(ended.set)
        with pytest.raises(AssertionError, match=r"left behind: .*thread left over"):
            leaves_nothing(threading.Thread(target=ended.wait, name="left over").start, within_s=0.1)


class Member:
    """Has so many threads after each of its groups."""

    def __init__(self, threads):
        self.pid, self.threads = 7, iter(threads)

    def begin(self, fn, *args):
        self.asked = fn.__name__

    def result(self):
        return (next(self.threads), 30) if self.asked == "leftovers" else True


@pytest.mark.hostile
def test_a_member_leaks_that_grows_with_each_of_its_groups():
    for threads in ([7, 7], [7, 8, 8], [7, 8, 9, 9], [9, 8]):
        _check_nothing_left([Member(threads)].copy, "cpu")
    with pytest.raises(AssertionError, match="grew"):
        _check_nothing_left([Member([7, 8, 9, 10])].copy, "cpu")
