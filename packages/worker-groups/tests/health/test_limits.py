"""Limits of private memory, kept in processes of their own."""

import mmap
import os
import signal
import subprocess

import pytest

from raycrew.worker_groups._health import limits
from raycrew.worker_groups._health.limits import MemoryLimits
from raycrew.worker_groups._health.process_table import Process, own_process, read_entry
from raycrew.worker_groups._health.sight import memory_of


@pytest.fixture
def child():
    with subprocess.Popen(["sleep", "3600"]) as process:
        yield process
        process.kill()


def test_who_has_more_is_ended_and_the_others_are_not(child):
    worker, kept = read_entry(child.pid).process, MemoryLimits()
    kept.set(worker, 2**40)
    kept.enforce()
    assert (child.poll(), kept.exceeded, kept.are_set) == (None, {}, True)
    kept.set(worker, 1)
    kept.enforce()
    assert child.wait() == -signal.SIGKILL
    assert 0 < kept.exceeded[worker] == kept.exceeded[worker] // 1024 * 1024
    kept.enforce()
    assert not kept.are_set
    kept.set(worker, 1)
    assert not kept.are_set, "it has ended"


@pytest.mark.hostile
def test_a_later_process_of_the_same_number_is_left_alone(child):
    worker, kept = read_entry(child.pid).process, MemoryLimits()
    kept.set(Process(worker.pid, worker.started + 1), 1)
    kept.enforce()
    assert (child.poll(), kept.exceeded, kept.are_set) == (None, {}, False)


def test_no_limit_is_none():
    kept = MemoryLimits()
    kept.set(own_process(), 0)
    assert not kept.are_set


def test_shared_memory_is_nobodys(monkeypatch):
    size, before = 64 * 2**20, memory_of(os.getpid())["RssAnon"]
    with mmap.mmap(-1, size) as shared:
        for _ in range(size // 2**20):
            shared.write(b"x" * 2**20)
        assert memory_of(os.getpid())["RssAnon"] < before + size // 2
        ended = []
        monkeypatch.setattr(limits, "kill", ended.append)
        kept = MemoryLimits()
        kept.set(own_process(), before + size // 2)
        kept.enforce()
        assert ended == []
