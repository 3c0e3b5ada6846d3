"""What an update is: names, shapes, dtypes, where their bytes lie, and a checksum for each bucket."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from raycrew.tensor_transport.errors import ManifestMismatchError
from raycrew.tensor_transport.protocols import Bytes

_ROW_WORDS = 8192
_WORD_WEIGHTS = np.asarray(np.random.PCG64(0).random_raw(_ROW_WORDS), np.uint64) | np.uint64(1)
"""Odd factors; the raw stream of a bit generator is the same in all versions of numpy."""

Schema = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name -> (dtype, shape)."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One named tensor: `size_bytes` bytes at `offset` of bucket `bucket`. Tied tensors share a place."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    size_bytes: int

    def view(self, bucket: torch.Tensor) -> torch.Tensor:
        """This tensor's bytes in `bucket` (uint8, 1-D), without a copy."""
        if not self.size_bytes:
            return torch.empty(self.shape, dtype=getattr(torch, self.dtype))
        raw = bucket[self.offset : self.offset + self.size_bytes]
        return raw.view(getattr(torch, self.dtype)).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Bucket:
    """One run of bytes in a store."""

    ticket: Any
    size_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """A complete, published version of a model's weights: small, picklable, for any number of receivers.

    Attributes:
        publisher: Unique name of the publisher's incarnation.
        version: Counts up within a publisher.
        tensors: Every named tensor and its place.
        buckets: Where the bytes are.
        gather_s: Seconds spent collecting the tensors (all-gathers and device copies included).
        put_s: Seconds spent on checksums and on copying the buckets into the store.
    """

    publisher: str
    version: int
    tensors: tuple[TensorEntry, ...]
    buckets: tuple[Bucket, ...] = field(repr=False)
    gather_s: float = 0.0
    put_s: float = 0.0

    @property
    def size_bytes(self) -> int:
        """Bytes that one receiver moves."""
        return sum(bucket.size_bytes for bucket in self.buckets)

    @property
    def schema(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape)."""
        return {entry.name: (entry.dtype, entry.shape) for entry in self.tensors}


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def schema_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The schema of a state dict; meta tensors will do."""
    return {name: (dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()}


def compare_schemas(expected: Schema, update: WeightUpdate) -> None:
    """Check an update against what the receiver has.

    Raises:
        ManifestMismatchError: With every missing name, unexpected name, and differing shape or dtype.
    """
    offered = update.schema
    missing = sorted(expected.keys() - offered.keys())
    unexpected = sorted(offered.keys() - expected.keys())
    mismatched = [
        f"{name}: receiver has {_describe(expected[name])}, update has {_describe(offered[name])}"
        for name in sorted(expected.keys() & offered.keys())
        if (expected[name][0], tuple(expected[name][1])) != offered[name]
    ]
    if not (missing or unexpected or mismatched):
        return
    parts = [
        f"{title}: {_shorten(found)}"
        for title, found in (("missing", missing), ("unexpected", unexpected), ("different", mismatched))
        if found
    ]
    error = ManifestMismatchError(
        f"update {update.version} does not fit the receiver's weights; nothing was fetched; "
        + "; ".join(parts),
        version=update.version,
    )
    error.missing, error.unexpected, error.mismatched = missing, unexpected, mismatched
    raise error


def checksum(data: Bytes) -> int:
    """A checksum for damage on the way, about 1.6 times as fast as crc32.

    Each row of 8192 32-bit words is summed modulo 2**64, every word times an odd factor of its position; the
    checksum is the crc32 of these sums and of the bytes that fill no row. A changed word changes its row's
    sum, words exchanged or changed in compensating ways change it but by chance, and so a damaged bucket
    passes with a probability of about 2**-32. It is no protection against somebody who means to deceive.
    """
    whole = data.size // (4 * _ROW_WORDS) * (4 * _ROW_WORDS)
    table = data[:whole].view(np.uint32).reshape(-1, _ROW_WORDS)
    sums = np.einsum("ij,j->i", table, _WORD_WEIGHTS)
    return zlib.crc32(data[whole:].data, zlib.crc32(sums.data))


def _describe(entry: tuple[str, tuple[int, ...]]) -> str:
    dtype, shape = entry
    return f"{dtype}{list(shape)}"


def _shorten(found: Sequence[str], limit: int = 5) -> str:
    rest = f", and {len(found) - limit} more" if len(found) > limit else ""
    return ", ".join(found[:limit]) + rest
