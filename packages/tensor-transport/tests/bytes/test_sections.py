"""Work on many bytes in sections: each is done once, whoever helps."""

import os
import threading
from itertools import pairwise

import pytest

from raycrew.tensor_transport._bytes import in_sections, share_out


@pytest.fixture(autouse=True)
def four_processors(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4))


def test_each_section_is_worked_on_once():
    size, done = 100 << 20, []
    in_sections(size, 3 << 20, lambda start, stop: done.append((start, stop)))
    done.sort()
    assert done[0][0] == 0 and done[-1][1] == size
    assert all(before[1] == after[0] for before, after in pairwise(done))


@pytest.mark.parametrize(
    ("mine", "leaves_half", "most"),
    [(64, False, 4), (4, False, 4), (2, False, 2), (1, False, 1), (64, True, 4), (4, True, 2), (3, True, 1)],
)
def test_nobody_helps_whom_this_process_has_no_processor_for(monkeypatch, mine, leaves_half, most):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(mine))
    at_once, there = threading.Semaphore(most), threading.Barrier(most)
    names = set()

    def work(part):
        if at_once.acquire(blocking=False):
            there.wait(60)  # Each of those that work gets one of the first sections.
        names.add(threading.current_thread().name)

    share_out(range(100), 100 << 20, work, leaves_half=leaves_half)
    assert len(names) == most


@pytest.mark.hostile
@pytest.mark.parametrize("threads", [0, 1])
def test_without_more_threads_it_is_done_all_the_same(monkeypatch, threads):
    start, left = threading.Thread.start, [None] * threads

    def begin(self):
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(self)

    monkeypatch.setattr(threading.Thread, "start", begin)
    # No thread is there yet for these processors.
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(90 + threads, 94 + threads))
    done = []
    in_sections(100 << 20, 1 << 20, lambda start, stop: done.append(start))
    assert sorted(done) == [i << 20 for i in range(100)]
