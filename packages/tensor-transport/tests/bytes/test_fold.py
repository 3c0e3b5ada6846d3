"""The fold sees changed, exchanged and missing bytes, wherever they are and however they are handed in."""

import sys

import numpy as np
import pytest
import torch

from raycrew.tensor_transport._bytes import FOLD_BYTES, Fold, SectionFolds, fold, fold_in_sections

fold_module = sys.modules[Fold.__module__]


def some(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4096, FOLD_BYTES - 1, FOLD_BYTES, 2 * FOLD_BYTES + 13])
def test_same_bytes_have_the_same_fold(size):
    data = some(size)
    whole = fold(data)
    assert 0 <= whole < 2**64 and whole == fold(data.copy()) == fold(torch.from_numpy(data.copy()))
    shifted = np.empty(size + 3, np.uint8)
    shifted[3:] = data
    assert fold(shifted[3:]) == whole == fold(torch.from_numpy(shifted)[3:])
    data.flags.writeable = False
    assert fold(data) == whole
    pieces = Fold()
    for start in range(0, size, FOLD_BYTES):
        pieces.update(data[start : start + FOLD_BYTES])
    assert pieces.value == whole


def test_changed_exchanged_and_missing_bytes_are_seen():
    data = some(2 * FOLD_BYTES + 1029)
    whole = fold(data)
    for position in (0, 1, 8, FOLD_BYTES - 1, FOLD_BYTES, 2 * FOLD_BYTES + 1028):
        for bit in (0, 7):
            changed = data.copy()
            changed[position] ^= 1 << bit
            assert fold(changed) != whole
    for a, b, size in ((0, 8, 8), (16, 16 + FOLD_BYTES, 64), (0, FOLD_BYTES, FOLD_BYTES), (3, 4, 1)):
        exchanged = data.copy()
        exchanged[a : a + size], exchanged[b : b + size] = data[b : b + size], data[a : a + size]
        assert fold(exchanged) != whole
    assert fold(data[:-1]) != whole and fold(np.append(data, np.uint8(0))) != whole
    assert len({fold(np.zeros(n, np.uint8)) for n in range(20)}) == 20


@pytest.mark.parametrize("size", [64, FOLD_BYTES, 3 * FOLD_BYTES, 3 * FOLD_BYTES + 128])
def test_signs_that_change_in_pairs_are_seen(size):
    data = some(size)
    words = len(data) // 8
    for pair in ((0, 1), (0, words - 1), (1, words // 2), (0, min(FOLD_BYTES // 8, words - 2))):
        changed = data.copy()
        for word in pair:
            changed[8 * word + 7] ^= 0x80
        assert fold(changed) != fold(data)
    negated = data.copy()
    negated[7::8] ^= 0x80
    assert fold(negated) != fold(data)


def moved(data, a, b, size):
    changed = data.copy()
    changed[a : a + size], changed[b : b + size] = data[b : b + size], data[a : a + size]
    return changed


PAGE = 4096
DAMAGE = {
    "pages swapped": lambda data: moved(data, PAGE, 3 * PAGE, PAGE),
    "pages of two rows swapped": lambda data: moved(data, 0, FOLD_BYTES, PAGE),
    "rows swapped": lambda data: moved(data, 0, 2 * FOLD_BYTES, FOLD_BYTES),
    "halves of words swapped": lambda data: data.reshape(-1, 2, 4)[:, ::-1].copy().reshape(-1),
    "one page on": lambda data: np.roll(data, PAGE),
    "one row on": lambda data: np.roll(data, FOLD_BYTES),
    "one element on": lambda data: np.roll(data, 4),
    "a page of zeros": lambda data: np.concatenate([data[:PAGE], np.zeros(PAGE, np.uint8), data[2 * PAGE :]]),
    "the end of zeros": lambda data: np.concatenate([data[:PAGE], np.zeros(len(data) - PAGE, np.uint8)]),
    "a page twice": lambda data: np.concatenate([data[:PAGE], data[:PAGE], data[2 * PAGE :]]),
    "a row twice": lambda data: np.concatenate([data[:FOLD_BYTES], data[:-FOLD_BYTES]]),
    "negated": lambda data: (-data.view(np.float32)).view(np.uint8),
    "conjugated": lambda data: data.view(np.complex64).conj().view(np.uint8),
}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_signs_of_two_rows_that_change_are_seen(dtype):
    size = np.dtype(dtype).itemsize
    data = np.random.default_rng(0).standard_normal(5 * FOLD_BYTES // size).astype(dtype)
    for row in range(1, 5):
        for elements in range(10):
            changed = data.copy()
            changed[[100, 100 + row * FOLD_BYTES // size - elements]] *= -1
            assert fold(changed.view(np.uint8)) != fold(data.view(np.uint8))


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_what_went_wrong_with_memory_is_seen(damage, dtype):
    numbers = np.random.default_rng(0).standard_normal(4 * FOLD_BYTES // np.dtype(dtype).itemsize)
    data = numbers.astype(dtype).view(np.uint8)
    changed = DAMAGE[damage](data)
    assert not np.array_equal(changed, data) and fold(changed) != fold(data)
    assert fold_in_sections(changed) != fold_in_sections(data)


@pytest.mark.parametrize("size", [8, 63, 64, 100, 128, 200, 64 * 67])
def test_rows_are_taken_up_by_the_rule(monkeypatch, size):
    monkeypatch.setattr(fold_module, "FOLD_BYTES", 64)
    data = some(size)
    width = -(-size // 8) * 8 + 8 if size < 64 else 64 + 128
    state = 0
    for row, start in enumerate(range(0, size, 64)):
        state ^= int.from_bytes(data[start : start + 64].tobytes(), "little") << 8 * (2 * (row % 64) + 1)
        halves = [(state >> at & 2**32 - 1) * 0x7F4A7C15 % 2**32 for at in range(0, 8 * width, 32)]
        state = sum(half << 32 * i for i, half in enumerate(halves))
    words = [state >> at & 2**64 - 1 for at in range(0, 8 * width, 64)]
    mixed = [word ^ word >> 32 for word in words]
    total = sum(word * int(factor) for word, factor in zip(mixed, fold_module._factors(), strict=False))
    assert fold(data) == (total + size * fold_module._FACTOR) % 2**64


def test_a_piece_that_is_no_multiple_is_the_last_one():
    pieces = Fold()
    pieces.update(some(10))
    with pytest.raises(ValueError, match="only the last piece"):
        pieces.update(some(1))


@pytest.mark.parametrize("size", [0, 1, 64, 65, 640, 1001])
def test_sections_are_folded_in_any_order_and_each_counts_where_it_is(monkeypatch, size):
    monkeypatch.setattr(fold_module, "SECTION_BYTES", 64)
    data = some(size)
    whole = fold_in_sections(data)
    assert 0 <= whole < 2**64 and whole == fold_in_sections(torch.from_numpy(data.copy()))
    folds = SectionFolds(size)
    for start in reversed(range(0, size, 64)):
        section = Fold()
        section.update(data[start : start + 64])
        folds.add(start, section)
    assert folds.value == whole
    others = [np.append(data, np.uint8(0))]
    for position in range(0, size, 63):
        others.append(data.copy())
        others[-1][position] ^= 0x80
    for a, b in ((0, 64), (64, 512)) if size >= 640 else ():
        others.append(data.copy())
        others[-1][a : a + 64], others[-1][b : b + 64] = data[b : b + 64], data[a : a + 64]
    folded = [whole, *map(fold_in_sections, others)]
    assert len(set(folded)) == len(folded)


@pytest.mark.gpu
def test_a_device_folds_as_the_processor_does():
    data = some(FOLD_BYTES + 77)
    assert fold(torch.from_numpy(data).cuda()) == fold(data)


class Device(str):
    """The processor, called otherwise."""

    __slots__ = ()
    type = "another"


class Elsewhere(torch.Tensor):
    """On the processor, and says that it is not."""

    device = property(lambda _: Device("cpu"))


@pytest.mark.parametrize("size", [0, 9, FOLD_BYTES, 3 * FOLD_BYTES + 77])
def test_what_is_not_on_the_processor_has_the_same_fold(size):
    data = some(size)
    assert fold(torch.from_numpy(data.copy()).as_subclass(Elsewhere)) == fold(data)


def test_folds_stay_what_they_were():
    data = (np.arange(80 * FOLD_BYTES) * 2654435761 >> 8).astype(np.uint8)
    sizes = (1, 8, 1000, FOLD_BYTES + 13, 3 * FOLD_BYTES)
    assert [fold(data[:size]) for size in sizes] == [
        11400714819323198485,
        10585932973664835526,
        9880136232024940684,
        1852832937421910237,
        11554664574286491932,
    ]
    assert [fold_in_sections(data[:size]) for size in (0, 100, 80 * FOLD_BYTES)] == [
        0,
        16259187999616232918,
        17243657887601283016,
    ]
