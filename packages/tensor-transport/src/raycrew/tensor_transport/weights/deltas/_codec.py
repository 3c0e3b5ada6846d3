"""What changed between two runs of bytes, element by element and bit by bit, in few bytes."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raycrew.tensor_transport.errors import DecodeError
from raycrew.tensor_transport.protocols import Bytes

BLOCK = 1 << 20
"""Elements that are encoded together, in whichever way takes least."""

_Words = npt.NDArray[np.unsignedinteger[Any]]
_Positions = npt.NDArray[np.int64]
_NOTHING = np.empty(0, np.uint8)
_WORDS: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_GAPS: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16}
_BITMAP, _WHOLE = 3, 4
_TABLE = np.dtype([("kind", "<u4"), ("count", "<u4"), ("index_bytes", "<u4")])


class Changes(NamedTuple):
    """The changed elements of a run of bytes.

    Attributes:
        table: For each block its kind (gaps of one or two bytes, a bitmap, all elements), how many elements
            changed, and how many bytes of `indices` are its.
        indices: Which elements changed, block after block.
        values: Their new values, in order.
    """

    table: npt.NDArray[np.void]
    indices: Bytes
    values: Bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of all of it."""
        return self.table.nbytes + self.indices.nbytes + self.values.nbytes

    @property
    def needs_base(self) -> bool:
        """Whether some block says only what changed."""
        return bool((self.table["kind"] != _WHOLE).any())


def as_words(data: Bytes, itemsize: int) -> _Words:
    """Bytes as the words that are compared: elements of up to eight bytes, halves of longer ones."""
    return data.view(_WORDS[min(itemsize, 8)])


def find_changes(old: _Words | None, new: _Words) -> Changes:
    """What `new` has that `old` has not, bit by bit: -0.0 is not 0.0, and a NaN is what its bits say.

    Args:
        old: What the receiver has; None where that is not known, and all elements are told.
        new: As many words.
    """
    rows, indices, values = [], [_NOTHING], [_NOTHING]
    for start in range(0, len(new), BLOCK):
        part = new[start : start + BLOCK]
        changed = None if old is None else np.flatnonzero(old[start : start + BLOCK] != part)
        kind, index = _smallest(changed, len(part), part.itemsize)
        told = part if changed is None or kind == _WHOLE else part[changed]
        rows.append((kind, len(told), index.nbytes))
        indices.append(index)
        values.append(np.ascontiguousarray(told).view(np.uint8))
    return Changes(np.array(rows, _TABLE), np.concatenate(indices), np.concatenate(values))


def apply_changes(words: _Words, changes: Changes) -> Changes:
    """Write changes into the words that they were found against; gives what undoes that.

    Raises:
        DecodeError: The changes are damaged, or of another number of words; nothing was written.
    """
    places = _places(changes, len(words), words.itemsize)
    values = changes.values.view(words.dtype)
    before, first = np.empty_like(values), 0
    for start, where in places:
        block = words[start : start + BLOCK]
        last = first + (len(block) if where is None else len(where))
        if where is None:
            before[first:last] = block
            block[:] = values[first:last]
        else:
            before[first:last] = block[where]
            block[where] = values[first:last]
        first = last
    return changes._replace(values=before.view(np.uint8))


def read_table(data: Bytes) -> npt.NDArray[np.void]:
    """The table of changes, from its bytes."""
    return data.view(_TABLE)


def table_bytes(words: int) -> int:
    """How long the table for so many words is."""
    return -(-words // BLOCK) * _TABLE.itemsize


def _places(changes: Changes, words: int, itemsize: int) -> list[tuple[int, _Positions | None]]:
    """Where each block begins, and which of its words changed; None for all of them.

    They are compared with what there is before anything is written.
    """
    table, found, begin = changes.table, [], 0
    sizes = [min(BLOCK, words - start) for start in range(0, words, BLOCK)]
    counted = int(table["count"].sum(dtype=np.int64)) * itemsize
    indexed = int(table["index_bytes"].sum(dtype=np.int64))
    if (len(table), counted, indexed) != (len(sizes), changes.values.nbytes, changes.indices.nbytes):
        raise DecodeError(f"damaged changes: {len(table)} blocks do not fit {words} words")
    for i, (size, row) in enumerate(zip(sizes, table.tolist(), strict=True)):
        kind, count, length = row
        where = _decode(kind, changes.indices[begin : begin + length], size)
        begin += length
        if count != (size if where is None else len(where)) or (
            count and where is not None and where[-1] >= size
        ):
            raise DecodeError(f"damaged changes: block {i} has no {count} changed words among its {size}")
        found.append((i * BLOCK, where))
    return found


def _smallest(changed: _Positions | None, size: int, itemsize: int) -> tuple[int, Bytes]:
    """The kind of a block that takes least, and its indices."""
    if changed is None:
        return _WHOLE, _NOTHING
    gaps = np.diff(changed, prepend=-1) - 1
    costs = {
        kind: kind * (len(gaps) + int((gaps // np.iinfo(word).max).sum())) for kind, word in _GAPS.items()
    }
    costs[_BITMAP] = -(-size // 8)
    costs[_WHOLE] = (size - len(changed)) * itemsize
    kind = min(costs, key=lambda kind: (costs[kind], kind))
    if kind == _WHOLE:
        return _WHOLE, _NOTHING
    if kind == _BITMAP:
        bits = np.zeros(size, np.bool_)
        bits[changed] = True
        return _BITMAP, np.packbits(bits)
    return kind, _encode_gaps(gaps, _GAPS[kind])


def _encode_gaps(gaps: _Positions, word: type[np.unsignedinteger[Any]]) -> Bytes:
    """Gaps between changed words; the greatest number says that as many are skipped, and no more."""
    most = int(np.iinfo(word).max)
    skips, rests = np.divmod(gaps, most)
    ends = np.cumsum(skips + 1) - 1
    encoded = np.full(int(ends[-1]) + 1 if len(ends) else 0, most, word)
    encoded[ends] = rests
    return encoded.view(np.uint8)


def _decode(kind: int, index: Bytes, size: int) -> _Positions | None:
    if kind == _WHOLE:
        return None
    if kind == _BITMAP and index.nbytes == -(-size // 8):
        return np.flatnonzero(np.unpackbits(index, count=size))
    if kind not in _GAPS or index.nbytes % kind:
        raise DecodeError(f"damaged changes: a block of kind {kind} with {index.nbytes} bytes of indices")
    gaps = index.copy().view(_GAPS[kind])
    ends = gaps != np.iinfo(gaps.dtype).max
    positions: _Positions = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(np.count_nonzero(ends))
    return positions
