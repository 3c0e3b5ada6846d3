"""A 64-bit fold of bytes that sees damage, and bytes that changed places, in the time of one look at them."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raycrew.tensor_transport._bytes.memory import unlocked
from raycrew.tensor_transport._bytes.sections import in_sections
from raycrew.tensor_transport.protocols import Bytes

FOLD_BYTES = 1 << 20
"""A block, which is still in a cache when it was copied: all but the last one have as many bytes."""
SECTION_BYTES = 8 * FOLD_BYTES
"""What one thread takes at a time."""

_ROWS = 128  # Of a block.
_COLUMNS = 2039  # A prime: what lies at a distance of this many words changed places by no rule.
_ROW_BYTES = 4 * _COLUMNS
_DEVICE_BYTES = 4 * SECTION_BYTES  # A device takes as many at a time, and as much memory beside them.
_HALF_BITS = 32
_HALF_MASK = 2**32 - 1
_FACTOR = 0x9E3779B97F4A7C15  # An odd number without a pattern: 2**64 over the golden ratio.


class BlockFolds:
    """Folds the blocks of bytes as these arrive, each while it is in the processor's cache.

    A block from its second byte on is a table of words of 32 bits. Its columns are added up, each row with an
    odd factor of its own, by one call of torch, whose product of matrices reads every word once, wherever it
    lies, and holds the sums in the nearest cache. Sums, and the bytes that no whole row is left for, are the
    block's state: its words of 64 bits, mixed, are added up with odd factors of their own.

    So one word that changes changes the fold, and so do two words of a column in a bit that is none of the
    highest eight: the signs of numbers, in bytes that are odd, never are, as the words begin with such a
    byte. Else changed, exchanged and missing bytes leave the fold as it is but by chance. It protects from
    damage, not from somebody who means to deceive.

    Args:
        data: The bytes, or memory for them.
    """

    def __init__(self, data: Bytes) -> None:
        whole = len(data) // FOLD_BYTES
        self._tables = _Tables(data[: whole * FOLD_BYTES], whole)
        self._last = data[whole * FOLD_BYTES :]

    def take(self, number: int) -> None:
        """Take up a block that is there."""
        if number < self._tables.count:
            self._tables.take(number)

    @property
    def values(self) -> list[int]:
        """The folds of all blocks, once all of them were taken up."""
        found = self._tables.values()
        if len(self._last):
            last = _Tables(self._last, 1)
            last.take(0)
            found += last.values()
        return found


class _Tables:
    """Blocks of one size."""

    def __init__(self, data: Bytes, count: int) -> None:
        self.count = count
        if not count:
            return
        size = len(data) // count
        self._blocks = data.reshape(count, size)
        self._rows, state_bytes = _measures(size)
        self._states = np.zeros((count, state_bytes), np.uint8)
        if self._rows:
            words = torch.from_numpy(unlocked(data)[1 : len(data) - (len(data) - 1) % 4].view(np.int32))
            shape, steps = (count, self._rows, _COLUMNS), (size // 4, _COLUMNS, 1)
            self._tables = words.as_strided(shape, steps).unbind()
            sums = torch.from_numpy(self._states.view(np.int32))
            self._sums = sums[:, :_COLUMNS].unsqueeze(1).unbind()
            self._factors = _row_factors()[:, : self._rows]

    def take(self, number: int) -> None:
        """Add up the columns of a block."""
        if self._rows:
            torch.mm(self._factors, self._tables[number], out=self._sums[number])

    def values(self) -> list[int]:
        """The folds."""
        if not self.count:
            return []
        end = 1 + self._rows * _ROW_BYTES
        left = self._blocks.shape[1] - end
        self._states[:, _ROW_BYTES] = self._blocks[:, 0]
        self._states[:, _ROW_BYTES + 1 : _ROW_BYTES + 1 + left] = self._blocks[:, end:]
        words = self._states.view(np.uint64)
        mixed = np.right_shift(words, _HALF_BITS)
        mixed ^= words
        mixed *= _factors()[: words.shape[1]]
        found: list[int] = mixed.sum(axis=1).tolist()
        return found


def _measures(size: int) -> tuple[int, int]:
    """How many rows a block of this size has, and how many bytes its state."""
    rows = (size - 1) // _ROW_BYTES
    left = size - rows * _ROW_BYTES
    return rows, -(-(_ROW_BYTES + left) // 8) * 8


def _fold_tables(blocks: torch.Tensor) -> torch.Tensor:
    """The folds of blocks (uint8, [count, size]) on any device."""
    count, size = blocks.shape
    rows, state_bytes = _measures(size)
    end = 1 + rows * _ROW_BYTES
    table = blocks[:, 1:end].clone(memory_format=torch.contiguous_format).view(-1).view(torch.int32)
    factors = _row_factors()[:, :rows].to(blocks.device)
    sums = (table.view(count, rows, _COLUMNS) * factors.view(rows, 1)).sum(1, dtype=torch.int32)
    parts = [sums.view(torch.uint8), blocks[:, :1], blocks[:, end:]]
    gap = state_bytes - sum(part.shape[1] for part in parts)
    words = torch.cat([*parts, blocks.new_zeros(count, gap)], 1).view(torch.int64)
    mixed = words ^ (words >> _HALF_BITS & _HALF_MASK)
    return (mixed * torch.from_numpy(_factors().view(np.int64)).to(words.device)[: words.shape[1]]).sum(1)


def _fold_on_device(data: torch.Tensor) -> list[int]:
    whole = len(data) // FOLD_BYTES * FOLD_BYTES
    parts = [data[start : min(start + _DEVICE_BYTES, whole)] for start in range(0, whole, _DEVICE_BYTES)]
    found = [_fold_tables(part.view(-1, FOLD_BYTES)) for part in parts]
    if whole < len(data):
        found.append(_fold_tables(data[whole:].view(1, -1)))
    return [value % 2**64 for value in torch.cat(found).tolist()] if found else []


def block_folds(data: Bytes) -> list[int]:
    """The folds of the blocks of bytes that are all there."""
    folds = BlockFolds(data)
    for number in range(len(data) // FOLD_BYTES):
        folds.take(number)
    return folds.values


class SectionFolds:
    """The fold of many bytes out of those of their blocks, which several threads take at once."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values = [0] * -(-size // FOLD_BYTES)

    def add(self, start: int, values: Sequence[int]) -> None:
        """Note the folds of the blocks from `start` on."""
        first = start // FOLD_BYTES
        self._values[first : first + len(values)] = values

    @property
    def value(self) -> int:
        """The fold of all blocks, from 0 to 2**64 - 1."""
        total = self._size
        for value in self._values:
            total = (total * _FACTOR + value) % 2**64
        return total


def fold_in_sections(data: Bytes | torch.Tensor) -> int:
    """The fold of bytes that are all there: an array, or a contiguous 1-D tensor of uint8 on any device."""
    return _fold(data, SECTION_BYTES)


def fold(data: Bytes | torch.Tensor) -> int:
    """The same by this thread alone."""
    return _fold(data, max(1, len(data)))


def _fold(data: Bytes | torch.Tensor, section_bytes: int) -> int:
    folds = SectionFolds(len(data))
    if isinstance(data, torch.Tensor) and data.device.type != "cpu":
        folds.add(0, _fold_on_device(data))
        return folds.value
    raw: Any = data.numpy() if isinstance(data, torch.Tensor) else data

    def take(start: int, stop: int) -> None:
        folds.add(start, block_folds(raw[start:stop]))

    in_sections(len(raw), section_bytes, take)
    return folds.value


@functools.cache
def _row_factors() -> torch.Tensor:
    """An odd factor for each row: in the nine lowest bits no two are the same, or one minus the other."""
    ends = np.arange(1, 2 * _ROWS, 2, dtype=np.uint64)
    random = np.asarray(np.random.PCG64(1).random_raw(_ROWS), np.uint64)
    found = (random & np.uint64(_HALF_MASK - 0x1FF)) | ends
    return torch.from_numpy(found.astype(np.uint32).view(np.int32).reshape(1, _ROWS))


@functools.cache
def _factors() -> npt.NDArray[np.uint64]:
    """Odd factors; the raw stream of a bit generator is the same in all versions of numpy."""
    return np.asarray(np.random.PCG64(0).random_raw(2 * _ROW_BYTES // 8 + 1), np.uint64) | np.uint64(1)
