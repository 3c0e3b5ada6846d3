"""Plain arrays of numbers as bytes, and back: pickle takes several times as long. numpy is the user's."""

from functools import lru_cache
from importlib import import_module
from typing import Any

#: No pickle begins with this one.
MARK = b"\x01"
_SIZE_BYTES = 2
_KINDS = "biufc"
_MOST_SHAPES = 4096


def is_plain(array: Any) -> bool:
    """Whether an ndarray can go as its bytes."""
    return array.dtype.kind in _KINDS and array.dtype.isnative and array.flags.c_contiguous and array.size > 0


def encode_array(array: Any) -> bytes:
    """Such an array as bytes."""
    return b"".join((_head(array.dtype.str, array.shape), array.data))


def decode_array(data: bytes) -> Any:
    """The array again: a copy, to be written to."""
    begin = len(MARK) + _SIZE_BYTES
    end = begin + int.from_bytes(data[len(MARK) : begin], "little")
    dtype, shape = _parsed(data[begin:end])
    return _numpy().frombuffer(data, dtype, offset=end).reshape(shape).copy()


@lru_cache(_MOST_SHAPES)
def _head(dtype: str, shape: tuple[int, ...]) -> bytes:
    text = " ".join([dtype, *map(str, shape)]).encode()
    return MARK + len(text).to_bytes(_SIZE_BYTES, "little") + text


@lru_cache(_MOST_SHAPES)
def _parsed(head: bytes) -> tuple[Any, tuple[int, ...]]:
    dtype, *shape = head.decode().split()
    return _numpy().dtype(dtype), tuple(map(int, shape))


@lru_cache(1)
def _numpy() -> Any:
    return import_module("numpy")
