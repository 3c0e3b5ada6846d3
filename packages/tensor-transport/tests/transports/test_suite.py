"""The suite of transports sees each of these faults: it would not be worth much otherwise."""

import dataclasses

import numpy as np
import pytest

from raycrew.tensor_transport.testing import PullCase, nothing_left
from raycrew.tensor_transport.testing._pulling.case import _check_alone
from raycrew.tensor_transport.transports import SharedMemoryTransport
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


def _without_fold(job):
    offer = dataclasses.replace(job.offer, fold=None)
    return base.Job(dataclasses.replace(job.region, offer=offer), job.target)


@pytest.mark.hostile
@pytest.mark.parametrize(
    ("broken", "seen"),
    [
        (Shifted, "other bytes"),
        (Unfolded, "damaged bytes are not seen"),
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
