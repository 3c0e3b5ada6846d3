"""A 64-bit fold of bytes that sees damage, and bytes that changed places, at about the speed of memory."""

import functools

import numpy as np
import torch

from raycrew.tensor_transport.protocols import Bytes

FOLD_BYTES = 256 << 10
"""All but the last of the pieces that a `Fold` is given in turn have a multiple of this size."""

_WORD = 8
_WIDTH = FOLD_BYTES // _WORD
_FACTOR = -7046029254386353131  # An odd number without a pattern: 2**64 over the golden ratio.


class Fold:
    """Folds bytes piece by piece: as they arrive, while they are in the processor's cache.

    Rows of words are taken up one after another, each time what was there is multiplied by an odd number; the
    columns are added up with odd factors of their own. All is modulo 2**64, so that a changed word always
    changes the fold, and several by chance do not with a probability of 2**-63 or so. It protects from
    damage, not from somebody who means to deceive.
    """

    def __init__(self) -> None:
        self._columns: torch.Tensor | None = None
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
        total = int((self._columns * factors).sum().item())
        return (total + self._size * _FACTOR) % 2**64

    def _add(self, words: torch.Tensor) -> None:
        if self._columns is None:
            self._columns = words.clone()
        elif len(words) == len(self._columns):
            torch.add(words, self._columns, alpha=_FACTOR, out=self._columns)
        else:
            self._columns *= _FACTOR
            self._columns[: len(words)] += words


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
    elif data.__array_interface__["data"][0] % _WORD or not data.flags.writeable:
        data = data.copy()
    return torch.from_numpy(data).view(torch.int64)


@functools.cache
def _factors() -> torch.Tensor:
    """Odd factors; the raw stream of a bit generator is the same in all versions of numpy."""
    raw = np.asarray(np.random.PCG64(0).random_raw(_WIDTH), np.uint64) | np.uint64(1)
    return torch.from_numpy(raw.view(np.int64))
