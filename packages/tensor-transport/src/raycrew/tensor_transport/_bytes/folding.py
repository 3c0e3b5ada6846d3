"""A 64-bit fold of bytes that sees damage, and bytes that changed places, in less time than a copy takes."""

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raycrew.tensor_transport._bytes.sections import in_sections
from raycrew.tensor_transport.protocols import Bytes

FOLD_BYTES = 256 << 10
"""All but the last of the pieces that a `Fold` is given in turn have a multiple of this size."""

_WORD = 8
_STEP = 2
_SLACK = 64 * _STEP
_HALF_BITS = 32
_HALF_MASK = 2**32 - 1
_FACTOR = 0x9E3779B97F4A7C15  # An odd number without a pattern: 2**64 over the golden ratio.
_HALF_FACTOR = _FACTOR & _HALF_MASK
_HALF_WORD = np.uint32(_HALF_FACTOR)


class Fold:
    """Folds bytes piece by piece: as they arrive, while they are in the processor's cache.

    Rows of bytes are taken up one after another: what there is by then is changed (xor) by the row, and its
    words of 32 bits are multiplied by an odd number. The first row begins at the second byte, each other one
    two bytes further on: rows that change places differ, and the signs of numbers, in bytes that are odd, are
    never the highest bits of a word, which change nothing but themselves. In the end words of 64 bits, mixed,
    are added up with odd factors of their own. Changed, exchanged and missing words change the fold but by
    chance. It protects from damage, not from somebody who means to deceive.
    """

    def __init__(self) -> None:
        self._columns: _Columns | _DeviceColumns | None = None
        self._size = 0
        self._ended = False

    def update(self, data: Bytes | torch.Tensor) -> None:
        """Take up bytes: an array of uint8, or a contiguous 1-D tensor of uint8 on any device.

        Raises:
            ValueError: The piece before this one had no whole number of `FOLD_BYTES`.
        """
        size = len(data)
        if not size:
            return
        if self._ended:
            raise ValueError(f"only the last piece may have no multiple of {FOLD_BYTES} bytes")
        self._ended = size % FOLD_BYTES != 0
        self._size += size
        raw: Any = data
        if isinstance(data, torch.Tensor) and data.device.type == "cpu":
            raw = data.numpy()
        if self._columns is None:
            self._columns = _columns_for(raw)
        for start in range(0, size, FOLD_BYTES):
            self._columns.add(raw[start : start + FOLD_BYTES])

    @property
    def value(self) -> int:
        """The fold of all bytes so far, from 0 to 2**64 - 1."""
        total = 0 if self._columns is None else self._columns.total()
        return (total + self._size * _FACTOR) % 2**64


class _Columns:
    """The words that each row changes, in place: so few passes over so little memory stay in the cache."""

    def __init__(self, width: int) -> None:
        self._raw = np.zeros(width, np.uint8)
        self._words = self._raw.view(np.uint32)
        self._start = 1

    def add(self, row: Bytes) -> None:
        """Take up a row, as bytes, which may lie anywhere: numpy copies words that are out of place first."""
        there = self._raw[self._start : self._start + len(row)]
        np.bitwise_xor(there, row, out=there)
        np.multiply(self._words, _HALF_WORD, out=self._words)
        self._start = (self._start + _STEP) % _SLACK

    def total(self) -> int:
        """The words, each with its factor."""
        words = self._raw.view(np.uint64)
        mixed = np.right_shift(words, _HALF_BITS)
        mixed ^= words
        mixed *= _factors()[: len(mixed)]
        return int(mixed.sum())


class _DeviceColumns:
    """The same on another device."""

    def __init__(self, width: int, device: torch.device) -> None:
        self._raw = torch.zeros(width, dtype=torch.uint8, device=device)
        self._start = 1

    def add(self, row: torch.Tensor) -> None:
        """Take up a row."""
        self._raw[self._start : self._start + len(row)] ^= row
        self._raw.view(torch.int32).mul_(_HALF_FACTOR)
        self._start = (self._start + _STEP) % _SLACK

    def total(self) -> int:
        """The words, each with its factor."""
        words = self._raw.view(torch.int64)
        factors = torch.from_numpy(_factors().view(np.int64)).to(words.device)[: len(words)]
        mixed = words ^ (words >> _HALF_BITS & _HALF_MASK)
        return int((mixed * factors).sum().item())


def _columns_for(data: Bytes | torch.Tensor) -> _Columns | _DeviceColumns:
    """Wide enough for the first piece; if it is a whole row, more may follow."""
    width = (-(-len(data) // _WORD) + 1) * _WORD if len(data) < FOLD_BYTES else FOLD_BYTES + _SLACK
    return _DeviceColumns(width, data.device) if isinstance(data, torch.Tensor) else _Columns(width)


SECTION_BYTES = 32 * FOLD_BYTES
"""What `SectionFolds` takes each from one thread."""


class SectionFolds:
    """The fold of many bytes out of those of their sections, which several threads take at once."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values = [0] * -(-size // SECTION_BYTES)

    def add(self, start: int, fold: Fold) -> None:
        """Note the fold of the section that begins at `start`."""
        self._values[start // SECTION_BYTES] = fold.value

    @property
    def value(self) -> int:
        """The fold of all sections, from 0 to 2**64 - 1."""
        total = self._size
        for value in self._values:
            total = (total * _FACTOR + value) % 2**64
        return total


def fold_in_sections(data: Bytes | torch.Tensor) -> int:
    """The `SectionFolds` of bytes that are all there."""
    folds = SectionFolds(len(data))

    def take(start: int, stop: int) -> None:
        section = Fold()
        section.update(data[start:stop])
        folds.add(start, section)

    if isinstance(data, torch.Tensor):
        for start in range(0, len(data), SECTION_BYTES):
            take(start, start + SECTION_BYTES)
    else:
        in_sections(len(data), SECTION_BYTES, take)
    return folds.value


def fold(data: Bytes | torch.Tensor) -> int:
    """The fold of bytes that are all there."""
    whole = Fold()
    whole.update(data)
    return whole.value


@functools.cache
def _factors() -> npt.NDArray[np.uint64]:
    """Odd factors; the raw stream of a bit generator is the same in all versions of numpy."""
    return np.asarray(np.random.PCG64(0).random_raw((FOLD_BYTES + _SLACK) // _WORD), np.uint64) | np.uint64(1)
