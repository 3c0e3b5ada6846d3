"""The delta of one tensor as one run of bytes, which says what it is for and what has to come out."""

import struct
from dataclasses import dataclass

import numpy as np
import torch

from raycrew.tensor_transport._bytes import fold
from raycrew.tensor_transport.errors import DamagedBytesError, DecodeError
from raycrew.tensor_transport.protocols import Bytes
from raycrew.tensor_transport.weights.deltas._codec import (
    Changes,
    apply_changes,
    as_words,
    find_changes,
    read_table,
    table_bytes,
)

_HEAD = struct.Struct("<4sIQqqQQQI")
_MAGIC = b"rcd2"
NO_VERSION = -1


@dataclass(frozen=True, slots=True)
class Delta:
    """The changed elements of one tensor.

    Attributes:
        source: Who counts the versions.
        version: What the tensor is afterwards.
        base: What it has to be before; `NO_VERSION` where that does not matter, as all of it is told.
        itemsize: Bytes of an element.
        whole_bytes: Bytes of the tensor.
        fold: Fold of its bytes afterwards.
        changes: Which elements have which values.
        kind: Dtype and shape of the tensor: bits mean something else in another one.
    """

    source: int
    version: int
    base: int
    itemsize: int
    whole_bytes: int
    fold: int
    changes: Changes
    kind: str = ""

    @property
    def size_bytes(self) -> int:
        """Bytes that are sent."""
        return _HEAD.size + len(self.kind.encode()) + self.changes.size_bytes

    def packed(self) -> Bytes:
        """All of it as one run of bytes."""
        kind = self.kind.encode()
        head = _HEAD.pack(
            _MAGIC,
            self.itemsize,
            self.source,
            self.version,
            self.base,
            self.whole_bytes,
            self.fold,
            self.changes.indices.nbytes,
            len(kind),
        )
        parts = [np.frombuffer(head + kind, np.uint8), self.changes.table.view(np.uint8)]
        return np.concatenate([*parts, self.changes.indices, self.changes.values])

    @classmethod
    def unpacked(cls, data: Bytes) -> "Delta":
        """The counterpart of `packed`.

        Raises:
            DecodeError: These bytes are no delta, or not all of it.
        """
        if data.nbytes < _HEAD.size or data[:4].tobytes() != _MAGIC:
            raise DecodeError("these bytes are no delta")
        head = _HEAD.unpack(data[: _HEAD.size].tobytes())
        _, itemsize, source, version, base, whole, fold, indexed, length = head
        word = min(itemsize, 8)
        if word not in (1, 2, 4, 8) or whole % itemsize:
            raise DecodeError(f"a damaged delta: {whole} bytes of elements of {itemsize}")
        table_start = _HEAD.size + length
        first = table_start + table_bytes(whole // word)
        last = first + indexed
        if last > data.nbytes or (data.nbytes - last) % word:
            raise DecodeError(f"a delta of {data.nbytes} bytes is not all there: its values begin at {last}")
        table = read_table(data[table_start:first].copy())
        changes = Changes(table, data[first:last], data[last:].copy())
        kind = data[_HEAD.size : table_start].tobytes().decode(errors="replace")
        return cls(source, version, base, itemsize, whole, fold, changes, kind)

    def apply(self, memory: Bytes, *, verify: bool = True) -> "Delta":
        """Write the changes into a tensor's bytes.

        Args:
            memory: The bytes, as they are in version `base`.
            verify: Compare the fold of the result; where it differs, the bytes are put back as they were.

        Returns:
            What undoes it.

        Raises:
            DecodeError: The delta is damaged, or that of a tensor of another size; nothing was written.
            DamagedBytesError: The result is not what it should be: these bytes were not those of `base`.
        """
        if memory.nbytes != self.whole_bytes:
            raise DecodeError(f"a delta of {self.whole_bytes} bytes can't be applied to {memory.nbytes}")
        words = as_words(memory, self.itemsize)
        undo = apply_changes(words, self.changes)
        if verify and fold(memory) != self.fold:
            apply_changes(words, undo)
            raise DamagedBytesError(
                f"the fold of the result differs: the receiver's bytes are not those of version {self.base}, "
                "though it says so; send it a full update"
            )
        return Delta(self.source, self.base, self.version, self.itemsize, self.whole_bytes, 0, undo)


def kind_of(tensor: torch.Tensor) -> str:
    """`bfloat16[2, 3]`: what a tensor has to be for the bits of another one to mean the same."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def encode_delta(
    old: Bytes | None,
    new: Bytes,
    itemsize: int,
    *,
    source: int = 0,
    version: int = 0,
    base: int = 0,
    kind: str = "",
) -> Delta:
    """What `new` has that `old` has not; all of it where that takes less, or `old` is None.

    Args:
        old: The bytes as the receiver has them.
        new: As many bytes.
        itemsize: Bytes of an element: elements are compared by their bits, and sent whole.
        source: Who counts the versions.
        version: What `new` is.
        base: What `old` is.
        kind: Dtype and shape of the tensor that these are the bytes of, for `DeltaTarget`.

    Raises:
        ValueError: The lengths differ, or are no multiple of `itemsize`.
    """
    if min(itemsize, 8) not in (1, 2, 4, 8) or new.nbytes % itemsize:
        raise ValueError(f"{new.nbytes} bytes are not elements of {itemsize} bytes")
    if old is not None and old.nbytes != new.nbytes:
        raise ValueError(f"{old.nbytes} bytes can't have become {new.nbytes}")
    words = as_words(new, itemsize)
    changes = find_changes(None if old is None else as_words(old, itemsize), words)
    needed = base if changes.needs_base else NO_VERSION
    return Delta(source, version, needed, itemsize, new.nbytes, fold(new), changes, kind)
