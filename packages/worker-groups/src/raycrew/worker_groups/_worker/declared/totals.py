"""Sums and means of values from several ranks, place by place, that hold what the element types do not."""

import operator
import sys
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any

from raycrew.worker_groups._worker.declared.rows import placewise

_NUMBERS = (int, float, complex)
_WITHOUT_SUM = (str, bytes, bytearray, list, set, frozenset, Mapping)

_NARROW_INTEGERS = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32")
_INTEGERS = (*_NARROW_INTEGERS, "int64", "uint64")


def add_up(parts: Sequence[Any], where: str = "they") -> Any:
    """The sum of values, place by place.

    Raises:
        TypeError: They are of different types, or of one that has no sum.
        ValueError: They have different shapes.
    """
    return placewise(parts, partial(_total, mean=False), where)


def average(parts: Sequence[Any], where: str = "they") -> Any:
    """The mean of values, place by place, each counting alike.

    Raises:
        TypeError: They are of different types, or of one that has no mean.
        ValueError: They have different shapes.
    """
    return placewise(parts, partial(_total, mean=True), where)


def _total(values: Sequence[Any], where: str, mean: bool) -> Any:
    _check_alike(values, where)
    first = values[0]
    if isinstance(first, _NUMBERS):
        return sum(values) / len(values) if mean else sum(values)
    own = _element_type(first)
    wide = _wide_type(own, mean)
    total = reduce(operator.add, [_cast(value, wide) if wide else value for value in values])
    result = total / len(values) if mean else total
    return _cast(result, own) if wide and own not in _INTEGERS else result


def _check_alike(values: Sequence[Any], where: str) -> None:
    first = values[0]
    if isinstance(first, _WITHOUT_SUM) or getattr(getattr(first, "dtype", None), "kind", None) in {*"USTV"}:
        raise TypeError(f"{where} are of type {_type_of(first)}, and only numbers and arrays are added up")
    for value in values:
        if _type_of(value) != _type_of(first):
            raise TypeError(f"{where} are of different types: {_type_of(first)} and {_type_of(value)}")
        if _shape_of(value) != _shape_of(first):
            raise ValueError(f"{where} have different shapes: {_shape_of(first)} and {_shape_of(value)}")


def _type_of(value: Any) -> str:
    if isinstance(value, _NUMBERS):
        return "number"
    kind, dtype = type(value), getattr(value, "dtype", None)
    return f"{kind.__module__}.{kind.__qualname__}" + (f" of {dtype}" if dtype is not None else "")


def _shape_of(value: Any) -> list[int] | None:
    shape = getattr(value, "shape", None)
    return None if shape is None or isinstance(value, _NUMBERS) else list(shape)


def _element_type(value: Any) -> str:
    """Name of the type of an array's elements, the same one in all libraries; empty if it is no array."""
    return str(getattr(value, "dtype", "")).rpartition(".")[2]


def _wide_type(name: str, mean: bool) -> str:
    """The type of elements in which those of a narrow one are added; empty if in their own."""
    if name in _INTEGERS:
        return "float64" if mean else "int64" if name in _NARROW_INTEGERS else ""
    return "float32" if name.startswith(("float16", "bfloat16", "float8")) else ""


def _cast(value: Any, name: str) -> Any:
    if hasattr(value, "astype"):
        return value.astype(name)
    if not hasattr(value, "to"):
        return value
    library = sys.modules[type(value.dtype).__module__.partition(".")[0]]  # there, as its array is
    return value.to(getattr(library, name))
