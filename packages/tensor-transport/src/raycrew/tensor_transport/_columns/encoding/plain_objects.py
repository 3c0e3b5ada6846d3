"""Objects as JSON, with tensors and arrays beside it as runs of bytes; nothing that would need unpickling."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from raycrew.tensor_transport._columns.kinds import KINDS, PackedTensor, RaggedTensor, kind_of
from raycrew.tensor_transport.errors import BatchSchemaError, DecodeError
from raycrew.tensor_transport.protocols import Bytes

_TAG = "$"
_AS_THEY_ARE = (type(None), bool, int, str)


def to_plain(value: Any, where: str, runs: list[Bytes]) -> Any:
    """A value as JSON; bytes of tensors and arrays are appended to `runs`.

    Args:
        value: None, truth values, numbers, texts, bytes, tensors, arrays of numbers or texts, and lists,
            tuples and dicts of these.
        where: What errors call the value.
        runs: Bytes so far.

    Raises:
        BatchSchemaError: It is or holds something else; the error names it.
        UnsupportedTensorError: A tensor has no plain bytes.
    """
    kind = type(value)
    if kind in _AS_THEY_ARE or (kind is float and math.isfinite(value)):
        return value
    if kind is float:
        return {_TAG: "float", "of": repr(value)}
    if kind is complex:
        return {_TAG: "complex", "of": [to_plain(part, where, runs) for part in (value.real, value.imag)]}
    if kind is bytes:
        return {_TAG: "bytes", "of": value.hex()}
    if kind is list:
        return [to_plain(item, f"{where}[{i}]", runs) for i, item in enumerate(value)]
    if kind is tuple:
        return {_TAG: "tuple", "of": [to_plain(item, f"{where}[{i}]", runs) for i, item in enumerate(value)]}
    if kind is dict:
        return _plain_dict(value, where, runs)
    if kind in (np.str_, np.bytes_):  # An array would lose zeros at the end.
        return {_TAG: kind.__name__, "of": str.__str__(value) if kind is np.str_ else value.hex()}
    if isinstance(value, np.generic):
        return _beside("scalar", np.asarray(value), where, runs)
    if kind in (torch.Tensor, torch.nn.Parameter, np.ndarray, RaggedTensor, PackedTensor):
        return _beside("rows", value, where, runs)
    raise BatchSchemaError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which can't be saved: only None, numbers, "
        "texts, bytes, tensors, arrays, and lists, tuples and dicts of these can; localize() handles first",
        key=where,
        actual=kind.__qualname__,
    )


def _plain_dict(value: dict[Any, Any], where: str, runs: list[Bytes]) -> Any:
    if all(type(key) is str for key in value) and _TAG not in value:
        return {key: to_plain(item, f"{where}[{key!r}]", runs) for key, item in value.items()}
    pairs = [
        [to_plain(key, f"a key of {where}", runs), to_plain(item, f"{where}[{key!r}]", runs)]
        for key, item in value.items()
    ]
    return {_TAG: "dict", "of": pairs}


def why_not_plain(value: Any) -> str:
    """Why a column without plain bytes can't be saved."""
    if isinstance(value, np.ndarray):
        return (
            f"is an array of {value.dtype}, which can't be saved: numbers, times, texts of <U and objects can"
        )
    return "holds handles, which can't be saved: localize() them first"


def _beside(tag: str, value: Any, where: str, runs: list[Bytes]) -> Any:
    """Something with plain bytes; without dimensions it has one row."""
    kind, flat = kind_of(value), isinstance(value, np.ndarray | torch.Tensor) and not value.ndim
    parts = kind.disassemble(value.reshape(1) if flat else value, where)
    if parts is None and isinstance(value, np.ndarray) and value.dtype == object and not flat:
        return {
            _TAG: "objects",
            "shape": list(value.shape),
            "of": to_plain(value.ravel().tolist(), where, runs),
        }
    if parts is None:
        raise BatchSchemaError(f"{where} {why_not_plain(value)}", key=where)
    runs.extend(parts[1])
    return {_TAG: tag, "kind": kind.name, "of": parts[0], "runs": len(parts[1]), "flat": flat}


def from_plain(value: Any, take: Callable[[int], Sequence[Bytes]]) -> Any:
    """The counterpart of `to_plain`.

    Args:
        value: As it was read from JSON.
        take: Gives the next so many runs of bytes.

    Raises:
        DecodeError: It is no such value.
    """
    if isinstance(value, list):
        return [from_plain(item, take) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: from_plain(item, take) for key, item in value.items()}
    match value:
        case {"$": "float", "of": "nan" | "inf" | "-inf" as text}:
            return float(text)
        case {"$": "complex", "of": [real, imaginary]}:
            return complex(_number(from_plain(real, take)), _number(from_plain(imaginary, take)))
        case {"$": "bytes" | "str_" | "bytes_" as tag, "of": str() as text}:
            return _text(tag, text)
        case {"$": "tuple", "of": list() as items}:
            return tuple(from_plain(item, take) for item in items)
        case {"$": "dict", "of": list() as pairs}:
            return dict(_pair(pair, take) for pair in pairs)
        case {"$": "objects", "shape": list() as shape, "of": list() as items}:
            return _objects([from_plain(item, take) for item in items], shape)
        case {
            "$": "rows" | "scalar" as tag,
            "kind": str() as name,
            "of": of,
            "runs": int() as count,
            "flat": flat,
        }:
            found = _kind(name).assemble(of, take(count))
            return found.reshape(())[()] if tag == "scalar" else found.reshape(()) if flat else found
    raise DecodeError(f"{value!r:.80} is no value of a saved batch")


def _text(tag: str, text: str) -> Any:
    if tag == "str_":
        return np.str_(text)
    return bytes.fromhex(text) if tag == "bytes" else np.bytes_(bytes.fromhex(text))


def _kind(name: str) -> Any:
    if name not in KINDS:
        raise DecodeError(f"there is no kind {name!r} of columns")
    return KINDS[name]


def _number(value: Any) -> float:
    if not isinstance(value, int | float):
        raise DecodeError(f"{value!r:.80} is no part of a complex number")
    return value


def _pair(pair: Any, take: Callable[[int], Sequence[Bytes]]) -> tuple[Any, Any]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise DecodeError(f"{pair!r:.80} is no key with its value")
    return from_plain(pair[0], take), from_plain(pair[1], take)


def _objects(items: list[Any], shape: list[Any]) -> Any:
    array = np.empty(len(items), dtype=object)
    for i, item in enumerate(items):  # An assignment of the whole list would look into nested ones.
        array[i] = item
    if not all(type(length) is int and length >= 0 for length in shape):
        raise DecodeError(f"{shape!r:.80} is not a shape")
    return array.reshape(shape)
