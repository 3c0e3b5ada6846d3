"""Arenas of a session that has many of them: few are looked at to find a free one, and to know the peak."""

from collections import deque
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pressing import press_everywhere

from raycrew.tensor_transport._bytes import ArenaSession
from raycrew.tensor_transport._bytes.shared.arena_files import Header

ARENA = 4096


def session():
    return closing(ArenaSession("test", None, arena_bytes=ARENA, max_bytes=None, directory=Path("/dev/shm")))


@pytest.mark.parametrize("count", [4, 32])
def test_few_arenas_are_looked_at_where_each_has_one_run(monkeypatch, count):
    """As where versions of a model follow each other: the one before the last makes room for the next."""
    looked, live = [0], Header.live.fget
    with session() as arenas:
        versions = deque()

        def publish():
            if len(versions) == 2:
                arenas.release(versions.popleft())
            versions.append([arenas.reserve(ARENA)[0] for _ in range(count)])

        for _ in range(4):
            publish()

        def noted(header):
            looked[0] += 1
            return live(header)

        monkeypatch.setattr(Header, "live", property(noted))
        publish()
    assert looked[0] <= 8 * count


@given(st.lists(st.tuples(st.integers(1, 2 * ARENA), st.integers(0, 5)), max_size=30))
def test_the_peak_is_the_most_that_was_held_after_any_put(steps):
    held, peak = deque(), 0
    with session() as arenas:
        for size, released in steps:
            held.append((size, *arenas.put([np.zeros(size, np.uint8)])))
            peak = max(peak, sum(size for size, _ in held))
            for _ in range(min(released, len(held))):
                arenas.release([held.popleft()[1]])
        stats = arenas.stats()
        assert (stats.peak_bytes, stats.held_bytes) == (peak, sum(size for size, _ in held))


@pytest.mark.hostile
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("how", ["put", "reserve"])
def test_what_an_interrupt_breaks_off_at_any_moment_takes_nothing_and_keeps_nobody_waiting(how, is_warm):
    runs = [np.full(size, 1, np.uint8) for size in (100, ARENA, 50)]

    def begun():
        made = stack.enter_context(session())
        if is_warm:
            made.put(runs[:1])
            made.release(made.put(runs))
        return made

    def act():
        taken[:] = arenas.put(runs) if how == "put" else [arenas.reserve(ARENA - 200)[0]]

    with ExitStack() as stack:
        arenas, taken = begun(), []
        for nth in press_everywhere(act, ["/_bytes/shared/"]):
            assert arenas.stats().shards == is_warm + len(taken), nth
            arenas.release(arenas.put(runs))
            arenas.release(taken)
            del taken[:]
            if not is_warm:
                stack.close()
                arenas = begun()
        assert nth > 20
