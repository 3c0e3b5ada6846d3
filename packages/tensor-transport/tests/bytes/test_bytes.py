import os
import threading

import numpy as np
import pytest

from raycrew.tensor_transport._bytes import memory as _bytes
from raycrew.tensor_transport._bytes import sections
from raycrew.tensor_transport._bytes.memory import copy_bytes


@pytest.fixture
def in_small_parts(monkeypatch):
    monkeypatch.setattr(sections, "_PARALLEL_BYTES", 8)
    monkeypatch.setattr(_bytes, "_COPY_PART", 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4))


@pytest.mark.parametrize("size", [0, 7, 8, 9, 64, 1001])
def test_every_byte_is_copied_once(in_small_parts, size):
    source, target = np.arange(size).astype(np.uint8), np.zeros(size + 2, np.uint8)
    copy_bytes(target[1:-1], source)
    assert np.array_equal(target[1:-1], source) and target[0] == target[-1] == 0


@pytest.mark.parametrize("size", [0, 1, 4097, (1 << 20) - 1, 1 << 20])
def test_a_part_is_copied_wherever_it_lies(size):
    source = np.random.default_rng(0).integers(0, 256, size + 3, np.uint8)
    source.flags.writeable = False
    target = np.zeros(size + 7, np.uint8)
    _bytes.copy_part(target[5 : 5 + size], source[3:])
    assert np.array_equal(target[5 : 5 + size], source[3:])
    assert not target[:5].any() and not target[5 + size :].any()


def test_nothing_is_written_once_an_interrupted_copy_has_ended(in_small_parts, monkeypatch):
    main, copy = threading.main_thread(), _bytes.copy_part
    helped, interrupted = threading.Event(), threading.Event()
    begun, ended = [], []

    def interrupted_copy(target, source):
        if threading.current_thread() is main:
            assert helped.wait(60)
            interrupted.set()
            raise KeyboardInterrupt
        begun.append(1)
        helped.set()
        assert interrupted.wait(60)
        copy(target, source)
        ended.append(1)

    monkeypatch.setattr(_bytes, "copy_part", interrupted_copy)
    with pytest.raises(KeyboardInterrupt):
        copy_bytes(np.zeros(10_000, np.uint8), np.ones(10_000, np.uint8))
    assert len(begun) == len(ended)


def test_a_helpers_error_is_raised(in_small_parts, monkeypatch):
    main, copy, failed = threading.main_thread(), _bytes.copy_part, threading.Event()

    def failing_copy(target, source):
        if threading.current_thread() is main:
            assert failed.wait(60)
            copy(target, source)
        else:
            failed.set()
            raise MemoryError("no memory")

    monkeypatch.setattr(_bytes, "copy_part", failing_copy)
    with pytest.raises(MemoryError, match="no memory"):
        copy_bytes(np.zeros(1000, np.uint8), np.ones(1000, np.uint8))
