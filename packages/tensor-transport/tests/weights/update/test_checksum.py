import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycrew.tensor_transport.weights._update.checksums import checksum


@settings(max_examples=60)
@given(st.integers(1, 200_000), st.data())
def test_checksum_sees_a_changed_bit_and_a_swap(size, data):
    raw = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    before = checksum(raw)
    changed = raw.copy()
    changed[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(changed) != before
    assert checksum(raw[:-1]) != before
    if size >= 16:
        swapped = raw.copy()
        swapped[:8], swapped[-8:] = raw[-8:], raw[:8]
        assert (checksum(swapped) != before) == bool((swapped != raw).any())


@pytest.mark.parametrize("bit", [0, 31, 32, 63])
def test_checksum_sees_changes_that_keep_the_sums_of_rows_and_columns(bit):
    raw = np.random.default_rng(bit).integers(0, 1 << 64, (64, 4096), dtype=np.uint64)
    changed = raw.copy()
    step = np.array([1 << bit], np.uint64)
    changed[[3, 40], [5, 9]] += step
    changed[[3, 40], [9, 5]] -= step
    assert (changed.sum(axis=0) == raw.sum(axis=0)).all()
    assert (changed.sum(axis=1) == raw.sum(axis=1)).all()
    assert checksum(changed.reshape(-1).view(np.uint8)) != checksum(raw.reshape(-1).view(np.uint8))


def test_checksum_sees_rows_and_blocks_that_changed_places():
    raw = np.random.default_rng(0).integers(0, 256, (16, 32 * 1024), dtype=np.uint8)
    before = checksum(raw.reshape(-1))
    assert checksum(raw[[1, 0, *range(2, 16)]].reshape(-1)) != before
    assert checksum(np.roll(raw, 4, axis=1).reshape(-1)) != before
