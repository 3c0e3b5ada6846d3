"""The fold sees changed, exchanged and missing bytes, wherever they are and however they are handed in."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from raycrew.tensor_transport._bytes import (
    FOLD_BYTES,
    SECTION_BYTES,
    BlockFolds,
    SectionFolds,
    fold,
    fold_in_sections,
)

fold_module = sys.modules[BlockFolds.__module__]
ROW = 4 * 2039


def some(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4096, FOLD_BYTES - 1, FOLD_BYTES, 2 * FOLD_BYTES + 13])
def test_same_bytes_have_the_same_fold(size):
    data = some(size)
    whole = fold(data)
    assert 0 <= whole < 2**64 and whole == fold(data.copy()) == fold_in_sections(
        torch.from_numpy(data.copy())
    )
    shifted = np.empty(size + 3, np.uint8)
    shifted[3:] = data
    assert fold(shifted[3:]) == whole == fold_in_sections(torch.from_numpy(shifted)[3:])
    data.flags.writeable = False
    assert fold(data) == whole == fold_in_sections(data)
    memory = np.empty_like(data)
    pieces, folds = BlockFolds(memory), SectionFolds(size)
    for number, start in enumerate(range(0, size, FOLD_BYTES)):
        memory[start : start + FOLD_BYTES] = data[start : start + FOLD_BYTES]
        pieces.take(number)
    folds.add(0, pieces.values)
    assert folds.value == whole


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


def by_the_rule(data):
    """The fold in plain words."""
    total = len(data)
    for start in range(0, len(data), FOLD_BYTES):
        block = data[start : start + FOLD_BYTES]
        rows = (len(block) - 1) // ROW
        table = block[1 : 1 + rows * ROW].copy().view(np.uint32).reshape(rows, 2039).astype(np.uint64)
        factors = fold_module._row_factors().numpy().view(np.uint32).reshape(-1, 1)[:rows].astype(np.uint64)
        sums = (table * factors).sum(axis=0, dtype=np.uint64).astype(np.uint32)
        state = sums.tobytes() + bytes(block[:1]) + bytes(block[1 + rows * ROW :])
        words = np.frombuffer(state + bytes(-len(state) % 8), np.uint64).tolist()
        mixed = (
            (word ^ word >> 32) * int(factor)
            for word, factor in zip(words, fold_module._factors(), strict=False)
        )
        total = (total * 0x9E3779B97F4A7C15 + sum(mixed)) % 2**64
    return total


SIZES = [0, 1, 2, 8, 100, ROW, ROW + 1, 2 * ROW, 2 * ROW + 1, 128 * ROW, 128 * ROW + 1, FOLD_BYTES - 1]
SIZES += [FOLD_BYTES, FOLD_BYTES + 1, FOLD_BYTES + ROW + 9, 3 * FOLD_BYTES, SECTION_BYTES + 5]


@pytest.mark.parametrize("size", SIZES)
def test_blocks_are_folded_by_the_rule(size):
    data = some(size)
    assert fold(data) == fold_in_sections(data) == by_the_rule(data)


def test_no_two_rows_have_factors_that_are_the_same_or_cancel_in_the_lowest_bits():
    factors = fold_module._row_factors().numpy().reshape(-1).astype(np.int64) % 512
    assert (factors % 2).all() and len({*factors, *(512 - factors)}) == 2 * len(factors)
    assert (fold_module._factors() % 2).all() and len(set(fold_module._factors())) == len(
        fold_module._factors()
    )


def folds_of(data, damages):
    """The folds of bytes and of damaged ones, all of them in place one after another."""
    found = [fold(data)]
    for damage in damages:
        undo = damage(data)
        found.append(fold(data))
        undo(data)
    assert fold(data) == found[0]
    return found


def flips(*places, bit=7):
    def damage(data):
        for place in places:
            data[place] ^= 1 << bit

    return lambda data: (damage(data), damage)[1]


@pytest.mark.hostile
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_no_two_signs_that_change_go_unseen(itemsize):
    """In one column, which is the worst place for them, any two rows and many columns; and in neighbours."""
    data = some(FOLD_BYTES)
    for first, second in ((0, 1), (0, 2), (3, 5), (0, 127), (63, 64), (31, 32)):
        for column in range(itemsize - 1, ROW, 1499 // itemsize * itemsize):
            for aside in (0, 4, 8, 2 * itemsize):
                a, b = first * ROW + column, second * ROW + column + aside
                a, b = a - a % itemsize + itemsize - 1, b - b % itemsize + itemsize - 1
                assert len(set(folds_of(data, [flips(a, b)]))) == 2, (a, b)


@pytest.mark.hostile
@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("bit", [7, 6, 0])
def test_no_rectangle_that_changes_goes_unseen(itemsize, bit):
    """Four elements at the corners of rectangles: of rows as models have them, and as the fold has them."""
    data, damages, made = some(2 * FOLD_BYTES), [], np.random.default_rng(0)
    for row_bytes in (64, 512, 4096, 1536, 8192, 16384, ROW, 2 * ROW, 8 * ROW):
        for _ in range(40):
            a = int(made.integers(0, FOLD_BYTES // itemsize)) * itemsize + itemsize - 1
            down = int(made.integers(1, max(2, FOLD_BYTES // row_bytes // 2))) * row_bytes
            right = int(made.integers(1, row_bytes // itemsize)) * itemsize
            damages.append(
                flips(a, a + down, a + right, a + down + right, bit=bit)
                if a + down + right < len(data)
                else flips(a)
            )
    assert folds_of(data, damages).count(fold(data)) == 1


@pytest.mark.hostile
@pytest.mark.parametrize("content", ["random", "normal16", "normal32", "normal64", "small", "ones", "zeros"])
def test_no_exchange_shift_or_repetition_goes_unseen(content):
    made = np.random.default_rng(0)
    size = 3 * FOLD_BYTES + 4096
    data = {
        "random": lambda: some(size),
        "normal16": lambda: made.standard_normal(size // 2).astype(np.float16),
        "normal32": lambda: made.standard_normal(size // 4).astype(np.float32),
        "normal64": lambda: made.standard_normal(size // 8),
        "small": lambda: made.integers(0, 300, size // 4, np.int32),
        "ones": lambda: np.ones(size // 4, np.float32),
        "zeros": lambda: np.zeros(size, np.uint8),
    }[content]().view(np.uint8)
    whole, seen = fold(data), 0
    for length in (8, 64, 768 * 4, 4096, ROW, 8192, 2 * ROW, 65536, FOLD_BYTES):
        for _ in range(20):
            a, b = (int(x) * 8 for x in made.integers(0, (size - length) // 8, 2))
            for changed in (
                moved(data, a, b, length) if abs(a - b) >= length else data,
                repeated(data, a, b, length),
            ):
                if not np.array_equal(changed, data):
                    seen += 1
                    assert fold(changed) != whole, (length, a, b)
        blank = data.copy()
        blank[a : a + length] = 0
        assert np.array_equal(blank, data) or fold(blank) != whole
        assert fold(np.concatenate([data[:a], np.zeros(length, np.uint8), data[a:]])) != whole
        assert fold(np.concatenate([data[:a], data[a + length :]])) != whole
        assert fold(np.concatenate([data, np.zeros(length, np.uint8)])) != whole
    assert seen > 100 or content in ("ones", "zeros")


def repeated(data, a, b, size):
    changed = data.copy()
    changed[b : b + size] = data[a : a + size]
    return changed


@pytest.mark.hostile
def test_random_damage_has_folds_of_its_own():
    data, made = some(FOLD_BYTES + 777), np.random.default_rng(1)
    damages = [
        flips(*made.integers(0, len(data), count), bit=int(bit))
        for bit in range(8)
        for count in [1, 2, 3] * 50
    ]
    found = folds_of(data, damages)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("size", [0, 1, 64, FOLD_BYTES, 3 * FOLD_BYTES + 41])
def test_blocks_are_folded_in_any_order_and_each_counts_where_it_is(size):
    data = some(size)
    whole = fold_in_sections(data)
    folds = SectionFolds(size)
    for start in reversed(range(0, size, FOLD_BYTES)):
        block = BlockFolds(data[start : start + FOLD_BYTES])
        block.take(0)
        folds.add(start, block.values)
    assert folds.value == whole
    others = [np.append(data, np.uint8(0))]
    for position in range(0, size, FOLD_BYTES // 7):
        others.append(data.copy())
        others[-1][position] ^= 0x80
    for a, b in ((0, 1), (0, 2), (1, 2)) if size > 3 * FOLD_BYTES else ():
        others.append(moved(data, a * FOLD_BYTES, b * FOLD_BYTES, FOLD_BYTES))
    folded = [whole, *map(fold_in_sections, others)]
    assert len(set(folded)) == len(folded)


def test_torch_starts_no_threads_for_a_fold():
    torch.set_num_threads(2)
    try:
        data = some(2 * FOLD_BYTES)
        before = set(Path("/proc/self/task").iterdir())
        fold(data)
        assert set(Path("/proc/self/task").iterdir()) <= before
    finally:
        torch.set_num_threads(1)


@pytest.mark.gpu
def test_a_device_folds_as_the_processor_does():
    data = some(FOLD_BYTES + 77)
    assert fold_in_sections(torch.from_numpy(data).cuda()) == fold(data)


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
    assert fold_in_sections(torch.from_numpy(data.copy()).as_subclass(Elsewhere)) == fold(data)


def test_folds_stay_what_they_were():
    data = (np.arange(40 * FOLD_BYTES) * 2654435761 >> 8).astype(np.uint8)
    sizes = (1, 8, 1000, FOLD_BYTES + 13, 3 * FOLD_BYTES)
    assert [fold(data[:size]) for size in sizes] == [
        11400714819323198485,
        7637838778038561514,
        15189907279438068185,
        3859874921405820086,
        2962321456534647092,
    ]
    assert [fold_in_sections(data[:size]) for size in (0, 100, 40 * FOLD_BYTES)] == [
        0,
        9549950899281913354,
        1745147886594055456,
    ]
