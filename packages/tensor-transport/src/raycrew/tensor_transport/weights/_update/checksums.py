"""Checksums of bytes and of weights: for damage on the way, not against somebody who means to deceive."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np
import torch

from raycrew.tensor_transport._bytes import tensor_bytes
from raycrew.tensor_transport.protocols import Bytes

_Words: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.uint64]]
_ROW_WORDS = 8192
_BLOCK_ROWS = 8
_ROW_BYTES = 8 * _ROW_WORDS
_SHIFT = 4
_FACTORS = np.asarray(np.random.PCG64(0).random_raw(_ROW_WORDS), np.uint64) | np.uint64(1)
"""Odd factors; the raw stream of a bit generator is the same in all versions of numpy."""


def checksum(data: Bytes) -> int:
    """A position-sensitive fold to 64 bits, at about the speed of one copy of the bytes.

    Each row of 8192 64-bit words is summed modulo 2**64, every word times an odd factor of its position, and
    so are the rows that begin four bytes later: what is a word's highest bit, of which an even number would
    cancel out in one sum, is a middle one in the other. The sums go through blake2b. A changed word changes
    its row's sums; words exchanged, or changed in compensating ways, change them but by chance.
    """
    rows = data.size // _ROW_BYTES
    sums = np.zeros((2, rows + 1), np.uint64)
    if rows:
        shifted = (data.size - _SHIFT) // _ROW_BYTES
        _sum_rows(_table(data, 0, rows), _table(data, _SHIFT, shifted), sums)
    sums[:, rows] = _sum_rest(data[rows * _ROW_BYTES :])
    digest = hashlib.blake2b(sums.data, digest_size=8, salt=data.size.to_bytes(16, "little"))
    return int.from_bytes(digest.digest(), "little")


def digest_weights(weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> str:
    """A digest of names, dtypes, shapes and values, whatever the order: equal where the weights are equal.

    What a trainer says of its model and a generator of its own can be compared after an update. A DTensor is
    to be gathered first (`gather_weights`).

    Raises:
        UnsupportedTensorError: A tensor has no plain bytes.
    """
    total = 0
    for name, tensor in weights.items() if isinstance(weights, Mapping) else weights:
        head = repr((name, str(tensor.dtype), tuple(tensor.shape), checksum(tensor_bytes(tensor, name))))
        total += int.from_bytes(hashlib.blake2b(head.encode(), digest_size=16).digest(), "little")
    return f"{total % (1 << 128):032x}"


def _sum_rest(rest: Bytes) -> tuple[np.uint64, np.uint64]:
    """Both sums of the bytes that fill no row, as if zeros followed."""
    words = -(-rest.size // 8)
    padded = np.zeros(8 * (words + 1), np.uint8)
    padded[: rest.size] = rest
    both = (padded[:-8].view(np.uint64), padded[_SHIFT:-_SHIFT].view(np.uint64))
    first, second = ((part * _FACTORS[:words]).sum(dtype=np.uint64) for part in both)
    return first, second


def _table(data: Bytes, start: int, rows: int) -> _Words:
    words = data[start : start + rows * _ROW_BYTES].view(np.uint64)
    return words.reshape(rows, _ROW_WORDS)


def _sum_rows(
    table: _Words,
    shifted: _Words,
    sums: _Words,
) -> None:
    """Both sums of all rows, block by block: the second pass over a block finds it in the cache."""
    for begin in range(0, len(table), _BLOCK_ROWS):
        for rows, found in ((table, sums[0]), (shifted, sums[1])):
            end = min(begin + _BLOCK_ROWS, len(rows))
            if begin < end:
                np.einsum("ij,j->i", rows[begin:end], _FACTORS, out=found[begin:end])
