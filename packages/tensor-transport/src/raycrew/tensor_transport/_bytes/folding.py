"""A 64-bit fold of bytes that sees damage, and bytes that changed places, at about the speed of memory."""

import functools

import numpy as np
import torch

from raycrew.tensor_transport._bytes.memory import unlocked
from raycrew.tensor_transport._bytes.sections import in_sections
from raycrew.tensor_transport.protocols import Bytes

FOLD_BYTES = 256 << 10
"""All but the last of the pieces that a `Fold` is given in turn have a multiple of this size."""

_WORD = 8
_HALF_BITS = 32
_HALF_MASK = 2**32 - 1
_WIDTH = FOLD_BYTES // _WORD
_FACTOR = -7046029254386353131  # An odd number without a pattern: 2**64 over the golden ratio.


class Fold:
    """Folds bytes piece by piece: as they arrive, while they are in the processor's cache.

    Rows of words are taken up one after another: what was there before is turned by half a word, so that a
    word's highest bit counts as much as its lowest, and multiplied by an odd number. The columns are added up
    with odd factors of their own. All is modulo 2**64: changed, exchanged and missing words change the fold
    but by chance. It protects from damage, not from somebody who means to deceive.
    """

    def __init__(self) -> None:
        self._columns: torch.Tensor | None = None
        self._turning: _Turning | None = None
        self._size = 0
        self._ended = False

    def update(self, data: Bytes | torch.Tensor) -> None:
        """Take up bytes: an array of uint8, or a contiguous 1-D tensor of uint8 on any device.

        Raises:
            ValueError: The piece before this one had no whole number of `FOLD_BYTES`.
        """
        if not len(data):
            return
        if self._ended:
            raise ValueError(f"only the last piece may have no multiple of {FOLD_BYTES} bytes")
        self._size += len(data)
        whole = len(data) // FOLD_BYTES * FOLD_BYTES
        for start in range(0, whole, FOLD_BYTES):
            self._add(_words(data[start : start + FOLD_BYTES]))
        if whole < len(data):
            self._ended = True
            self._add(_words(data[whole:]))

    @property
    def value(self) -> int:
        """The fold of all bytes so far, from 0 to 2**64 - 1."""
        if self._columns is None:
            return 0
        factors = _factors()[: len(self._columns)].to(self._columns.device)
        mixed = self._columns ^ (self._columns >> _HALF_BITS)
        return (int((mixed * factors).sum().item()) + self._size * _FACTOR) % 2**64

    def _add(self, words: torch.Tensor) -> None:
        if self._columns is None:
            self._columns = words.clone()
            return
        if len(words) < len(self._columns):
            words = torch.cat([words, words.new_zeros(len(self._columns) - len(words))])
        if words.device.type != "cpu":
            low = self._columns >> _HALF_BITS & _HALF_MASK
            turned = low | torch.roll(self._columns, -1) << _HALF_BITS
            self._columns = torch.add(words, turned, alpha=_FACTOR)
            return
        if self._turning is None:
            self._turning = _Turning(self._columns)
        self._columns = self._turning.add(words)


class _Turning:
    """Two rows in turn, each readable half a word further on. NumPy, as torch takes a fifth longer for it."""

    def __init__(self, first: torch.Tensor) -> None:
        size = first.nbytes
        raw = [np.zeros(size + _WORD // 2, np.uint8) for _ in range(2)]
        self._raw = raw
        self._rows = [r[:size].view(np.int64) for r in raw]
        self._turned = [np.frombuffer(r.data, np.int64, -1, _WORD // 2) for r in raw]
        self._rows[0][:] = first.numpy()
        self._now = 0

    def add(self, words: torch.Tensor) -> torch.Tensor:
        now, raw = self._now, self._raw[self._now]
        raw[-_WORD // 2 :] = raw[: _WORD // 2]
        self._now = 1 - now
        row = self._rows[1 - now]
        np.multiply(self._turned[now], _FACTOR, out=row)
        np.add(words.numpy(), row, out=row)
        return torch.from_numpy(row)


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


def _words(data: Bytes | torch.Tensor) -> torch.Tensor:
    """Bytes as words; zeros fill the last one up, and bytes that do not begin at a word are copied."""
    if isinstance(data, torch.Tensor):
        if len(data) % _WORD:
            data = torch.cat([data, data.new_zeros(-len(data) % _WORD)])
        return (data.clone() if data.storage_offset() % _WORD else data).view(torch.int64)
    if len(data) % _WORD:
        data = np.concatenate([data, np.zeros(-len(data) % _WORD, np.uint8)])
    elif data.__array_interface__["data"][0] % _WORD:
        data = data.copy()
    return torch.from_numpy(unlocked(data)).view(torch.int64)


@functools.cache
def _factors() -> torch.Tensor:
    """Odd factors; the raw stream of a bit generator is the same in all versions of numpy."""
    raw = np.asarray(np.random.PCG64(0).random_raw(_WIDTH), np.uint64) | np.uint64(1)
    return torch.from_numpy(raw.view(np.int64))
