"""Whether two values are equal, at any depth: one bool, where tensors and arrays give one per element."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from raycrew.tensor_transport._columns.kinds import PackedTensor, RaggedTensor
from raycrew.tensor_transport.errors import BatchSchemaError


def equal(a: Any, b: Any) -> bool:
    """Whether two values are of one type and equal; tensors and arrays in dtype and shape as well.

    A NaN equals a NaN. Tensors on different devices are compared as well; of meta tensors, which have no
    values, only dtype and shape. Data classes are compared field by field.
    """
    if a is b:
        return True
    match a, b:
        case torch.Tensor(), torch.Tensor():
            return _equal_tensors(a, b)
        case (np.ma.MaskedArray(), np.ndarray()) | (np.ndarray(), np.ma.MaskedArray()):
            return type(a) is type(b) and _equal_masked(a, b)
        case np.ndarray(), np.ndarray():
            return _equal_arrays(a, b)
        case (RaggedTensor(), RaggedTensor()) | (PackedTensor(), PackedTensor()):
            return equal(vars(a), vars(b))
        case Mapping(), Mapping():
            return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
        case (list() | tuple(), list() | tuple()):
            return type(a) is type(b) and _equal_rows(a, b)
        case np.generic(), np.generic():
            return type(a) is type(b) and _equal_arrays(np.asarray(a), np.asarray(b))
        case float() | complex(), float() | complex():
            return type(a) is type(b) and (a == b or (a != a and b != b))
    return type(a) is type(b) and _equal_objects(a, b)


def equal_columns(key: str, a: Any, b: Any) -> bool:
    """As `equal`, of a column.

    Raises:
        BatchSchemaError: It holds objects whose `==` gives no truth value.
    """
    try:
        return equal(a, b)
    except (RuntimeError, TypeError, ValueError) as error:
        raise BatchSchemaError(f"column {key!r} can't be compared: {error}", key=key) from error


def _equal_masked(a: Any, b: Any) -> bool:
    """What is masked has no value."""
    here, there = np.ma.getmaskarray(a), np.ma.getmaskarray(b)
    return _equal_arrays(here, there) and equal(np.asarray(a)[~here], np.asarray(b)[~there])


def _equal_objects(a: Any, b: Any) -> bool:
    """By their `==`; data classes by their fields where that says no, or can't say."""
    by_fields = getattr(getattr(type(a), "__dataclass_params__", None), "eq", False)
    try:
        same = bool(a == b)
    except (RuntimeError, ValueError):  # Tensors and arrays have no one truth value.
        if not by_fields:
            raise
        same = False
    if same or not by_fields:
        return same
    return all(equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a) if f.compare)


def _equal_rows(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(equal, a, b))


def _equal_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.is_meta != b.is_meta:
        return False
    if a.is_meta:
        return True
    if a.is_nested or b.is_nested:
        return a.is_nested and b.is_nested and _equal_rows(a.unbind(), b.unbind())
    if a.layout != b.layout:
        return False
    if a.layout != torch.strided:
        return _equal_tensors(a.to_dense(), b.to_dense())
    here, there = a.detach(), b.detach().to(a.device)
    if a.dtype.is_floating_point and a.dtype.itemsize == 1:  # float8 has no comparison of its own
        here, there = here.float(), there.float()
    same = here == there
    if a.dtype.is_floating_point or a.dtype.is_complex:
        same |= (here != here) & (there != there)
    return bool(same.all())


def _equal_arrays(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.names is not None:
        return all(_equal_arrays(a[name], b[name]) for name in a.dtype.names)
    if a.dtype.hasobject:
        return _equal_rows(a.tolist(), b.tolist())
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM"))
