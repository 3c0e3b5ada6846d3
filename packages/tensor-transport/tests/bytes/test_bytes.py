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
    monkeypatch.setattr(sections.os, "cpu_count", lambda: 4)


@pytest.mark.parametrize("size", [0, 7, 8, 9, 64, 1001])
def test_every_byte_is_copied_once(in_small_parts, size):
    source, target = np.arange(size).astype(np.uint8), np.zeros(size + 2, np.uint8)
    copy_bytes(target[1:-1], source)
    assert np.array_equal(target[1:-1], source) and target[0] == target[-1] == 0


def test_nothing_is_written_once_an_interrupted_copy_has_ended(in_small_parts, monkeypatch):
    main, copyto = threading.main_thread(), np.copyto
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
        copyto(target, source)
        ended.append(1)

    monkeypatch.setattr(_bytes.np, "copyto", interrupted_copy)
    with pytest.raises(KeyboardInterrupt):
        copy_bytes(np.zeros(10_000, np.uint8), np.ones(10_000, np.uint8))
    assert len(begun) == len(ended)


def test_a_helpers_error_is_raised(in_small_parts, monkeypatch):
    main, copyto, failed = threading.main_thread(), np.copyto, threading.Event()

    def failing_copy(target, source):
        if threading.current_thread() is main:
            assert failed.wait(60)
            copyto(target, source)
        else:
            failed.set()
            raise MemoryError("no memory")

    monkeypatch.setattr(_bytes.np, "copyto", failing_copy)
    with pytest.raises(MemoryError, match="no memory"):
        copy_bytes(np.zeros(1000, np.uint8), np.ones(1000, np.uint8))
