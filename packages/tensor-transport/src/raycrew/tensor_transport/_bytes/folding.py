"""A 64-bit fold of bytes that sees damage, and bytes that changed places, in less time than a copy takes."""

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raycrew.tensor_transport._bytes.sections import in_sections
from raycrew.tensor_transport.protocols import Bytes

FOLD_BYTES = 128 << 10
"""All but the last of the pieces that a `Fold` is given in turn have a multiple of this size."""

_WORD = 8
_TURN = 3
_HALF_BITS = 32
_HALF_MASK = 2**32 - 1
_WIDTH = FOLD_BYTES // _WORD
_FACTOR = 0x9E3779B97F4A7C15  # An odd number without a pattern: 2**64 over the golden ratio.
_FACTOR_WORD = np.uint64(_FACTOR)


class Fold:
    """Folds bytes piece by piece: as they arrive, while they are in the processor's cache.

    Rows of bytes are taken up one after another: what there is by then is changed (xor) by the row, turned
    by three bytes, so that a word's highest bits, the signs of most numbers, count as much as its lowest,
    and its words are multiplied by an odd number. In the end they are added up with odd factors of their
    own. All is modulo 2**64: changed, exchanged and missing words change the fold but by chance. It protects
    from damage, not from somebody who means to deceive.
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
    """The words of a row, changed by each row. All views are made once: rows come every few microseconds."""

    def __init__(self, width: int) -> None:
        self._words = np.zeros(width // _WORD, np.uint64)
        self._raw = self._words.view(np.uint8)
        spare = np.zeros(width + _TURN, np.uint8)
        self._turned, self._begin, self._end = spare[_TURN:], spare[:_TURN], spare[width:]
        self._spare_words = spare[:width].view(np.uint64)

    def add(self, row: Bytes) -> None:
        """Take up a row; zeros fill a shorter one up."""
        if len(row) < len(self._raw):
            row = np.concatenate([row, np.zeros(len(self._raw) - len(row), np.uint8)])
        # As bytes they may lie anywhere: words out of place are buffered by numpy, at thrice the time.
        np.bitwise_xor(self._raw, row, out=self._turned)
        self._begin[:] = self._end
        np.multiply(self._spare_words, _FACTOR_WORD, out=self._words)

    def total(self) -> int:
        """The words, each with its factor."""
        mixed = np.right_shift(self._words, _HALF_BITS, out=self._spare_words)
        mixed ^= self._words
        mixed *= _factors()[: len(mixed)]
        return int(mixed.sum())


class _DeviceColumns:
    """The same on another device."""

    def __init__(self, width: int, device: torch.device) -> None:
        self._words = torch.zeros(width // _WORD, dtype=torch.int64, device=device)

    def add(self, row: torch.Tensor) -> None:
        """Take up a row; zeros fill a shorter one up."""
        raw = self._words.view(torch.uint8)
        raw[: len(row)] ^= row
        self._words = torch.roll(raw, _TURN).view(torch.int64) * (_FACTOR - 2**64)

    def total(self) -> int:
        """The words, each with its factor."""
        factors = torch.from_numpy(_factors().view(np.int64)).to(self._words.device)[: len(self._words)]
        mixed = self._words ^ (self._words >> _HALF_BITS & _HALF_MASK)
        return int((mixed * factors).sum().item())


def _columns_for(data: Bytes | torch.Tensor) -> _Columns | _DeviceColumns:
    width = -(-min(len(data), FOLD_BYTES) // _WORD) * _WORD
    return _DeviceColumns(width, data.device) if isinstance(data, torch.Tensor) else _Columns(width)


SECTION_BYTES = 64 * FOLD_BYTES
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
    return np.asarray(np.random.PCG64(0).random_raw(_WIDTH), np.uint64) | np.uint64(1)
