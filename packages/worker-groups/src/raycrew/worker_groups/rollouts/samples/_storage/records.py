"""Records of a journal as bytes, and back. Pure.

A record is a head in JSON and some rows, behind the length of both, its CRC-32, and theirs: a length that is
not what was written must not hide what is behind it.
"""

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_LENGTH = struct.Struct("<Q")
_FRAME = struct.Struct("<QII")
_SIZE = struct.Struct("<I")


class DamagedError(Exception):
    """Something that was written whole is not what was written; at which offset."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


class Record(NamedTuple):
    """One record.

    Attributes:
        head: What it says.
        rows_at: Where its rows begin.
        end: Where the next record begins.
    """

    head: dict[str, Any]
    rows_at: int
    end: int


def encode(head: Mapping[str, Any], rows: Sequence[bytes] = ()) -> tuple[bytes, int]:
    """A record as bytes, and where in them its rows begin."""
    text = json.dumps(head, separators=(",", ":")).encode()
    payload = b"".join((_SIZE.pack(len(text)), text, *rows))
    frame = _FRAME.pack(len(payload), _check_of(len(payload)), zlib.crc32(payload))
    return frame + payload, _FRAME.size + _SIZE.size + len(text)


def records(data: bytes | memoryview, *, is_last: bool) -> Iterator[Record]:
    """The records of a file; in the last file the last one may have been cut short, and is left out.

    Raises:
        DamagedError: Another one is not whole.
    """
    offset, view = 0, memoryview(data)
    while offset < len(view):
        found = _record(view, offset)
        if found is None:
            if is_last and _is_tail(view, offset):
                return
            raise DamagedError(offset)
        yield found
        offset = found.end


def _check_of(length: int) -> int:
    return zlib.crc32(_LENGTH.pack(length))


def _record(view: memoryview, offset: int) -> Record | None:
    begin = offset + _FRAME.size
    if begin > len(view):
        return None
    size, check_of_size, check = _FRAME.unpack_from(view, offset)
    if _check_of(size) != check_of_size or begin + size > len(view):
        return None
    if zlib.crc32(view[begin : begin + size]) != check:
        return None
    (text_size,) = _SIZE.unpack_from(view, begin)
    rows_at = begin + _SIZE.size + text_size
    return Record(json.loads(bytes(view[begin + _SIZE.size : rows_at])), rows_at, begin + size)


def _is_tail(view: memoryview, offset: int) -> bool:
    """Whether a record that is not whole is the last one: nothing is behind it, or nothing but zeros."""
    begin = offset + _FRAME.size
    if begin > len(view) or not any(view[offset:]):
        return True
    size, check_of_size, _ = _FRAME.unpack_from(view, offset)
    return bool(_check_of(size) == check_of_size and begin + size >= len(view))
