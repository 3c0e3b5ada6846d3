"""Numbers that several batches have, made one: sums, means and extremes, at any depth of mappings."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from raycrew.tensor_transport.errors import BatchSchemaError

REDUCTIONS = ("concat", "sum", "mean", "min", "max")
Path = tuple[str, ...]
_NUMBERS = (int, float, complex, np.number, np.bool_)


def reduce_values(name: str, path: Path, values: Sequence[Any], rows: Sequence[int]) -> Any:
    """The values of several batches as one; of mappings key by key, over those that have the key.

    A mean of means is that of all values, whatever was joined first, but for rounding to their dtype, and
    only where each batch has the key: a join counts with all of its rows for whatever it has.

    Args:
        name: One of `REDUCTIONS`.
        path: The keys that lead to the values, for errors.
        values: At least one.
        rows: How much each value counts in a mean; one of no rows counts only where all have none.

    Raises:
        BatchSchemaError: They are no numbers (no lists, for `concat`), or do not fit each other.
    """
    if all(isinstance(value, Mapping) for value in values):
        return {
            key: reduce_values(
                name,
                (*path, key),
                [value[key] for value in values if key in value],
                [count for value, count in zip(values, rows, strict=True) if key in value],
            )
            for key in {key: None for value in values for key in value}
        }
    if name == "concat":
        if not all(isinstance(value, list) for value in values):
            raise _wrong(name, path, "lists", values)
        return list(chain.from_iterable(values))
    if name != "mean":
        return _reduced(name, path, values, rows)
    counting = [i for i, count in enumerate(rows) if count]
    if not counting:
        return _reduced(name, path, values, [1] * len(values))
    return _reduced(name, path, [values[i] for i in counting], [rows[i] for i in counting])


def named(path: Path) -> str:
    """What errors call a value in metadata."""
    return "metadata " + ", ".join(map(repr, path))


def _reduced(name: str, path: Path, values: Sequence[Any], rows: Sequence[int]) -> Any:
    if all(isinstance(value, _NUMBERS) for value in values):
        values = [value.item() if isinstance(value, np.integer | np.bool_) else value for value in values]
        _check_order(name, path, values, any(isinstance(v, complex | np.complexfloating) for v in values))
        return _of_numbers(name, values, rows)
    first = values[0]
    if not isinstance(first, torch.Tensor) and not (
        type(first) is np.ndarray and first.dtype.kind in "biufc"
    ):
        raise _wrong(name, path, "numbers, tensors, arrays of numbers, or mappings of these", values)
    for value in values:
        if type(value) is not type(first) or (value.dtype, value.shape) != (first.dtype, first.shape):
            raise _wrong(name, path, "of one class, dtype and shape", values)
    if isinstance(first, torch.Tensor):
        _check_order(name, path, values, first.is_complex())
        try:
            return _of_tensors(name, torch.stack([value.detach().to(first.device) for value in values]), rows)
        except NotImplementedError as error:
            raise _wrong(name, path, f"of a dtype for which torch has it ({error})", values) from error
    _check_order(name, path, values, first.dtype.kind == "c")
    return _of_arrays(name, np.stack(values), rows)


def _of_numbers(name: str, values: Sequence[Any], rows: Sequence[int]) -> Any:
    if name == "sum":
        return sum(values)
    if name == "mean":
        return _mean(values, rows)
    if unknown := [value for value in values if math.isnan(value)]:
        return unknown[0]
    return (min if name == "min" else max)(values)


def _mean(values: Sequence[Any], rows: Sequence[int]) -> Any:
    """In double precision, or that of a larger dtype; of scalars of one narrow dtype in that dtype."""
    exact = [
        value.item() if isinstance(value, np.inexact) and value.itemsize < 16 else value for value in values
    ]
    mean = sum(value * count for value, count in zip(exact, rows, strict=True)) / sum(rows)
    kinds = {type(value) for value in values}
    kind = kinds.pop() if len(kinds) == 1 else None
    return kind(mean) if kind is not None and issubclass(kind, np.inexact) else mean


def _of_arrays(name: str, stacked: Any, rows: Sequence[int]) -> Any:
    if name != "mean":
        return getattr(stacked, name)(axis=0)
    wide = stacked.astype(np.float64) if stacked.dtype.kind == "f" and stacked.itemsize < 8 else stacked
    mean = np.average(wide, axis=0, weights=rows)
    return mean.astype(stacked.dtype) if stacked.dtype.kind in "fc" else mean


def _of_tensors(name: str, stacked: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    if name != "mean":
        return stacked.sum(0) if name == "sum" else stacked.amin(0) if name == "min" else stacked.amax(0)
    exact = stacked if stacked.is_complex() else stacked.double()
    weights = torch.tensor(rows, dtype=exact.dtype, device=exact.device)
    mean: torch.Tensor = torch.tensordot(weights, exact, dims=1) / weights.sum()
    return mean.to(stacked.dtype) if stacked.is_floating_point() else mean


def _check_order(name: str, path: Path, values: Sequence[Any], is_complex: bool) -> None:
    if is_complex and name in ("min", "max"):
        raise _wrong(name, path, "numbers that have an order", values)


def _wrong(name: str, path: Path, what: str, values: Sequence[Any]) -> BatchSchemaError:
    kinds = sorted({type(value).__name__ for value in values})
    return BatchSchemaError(
        f"{named(path)} can't be joined by {name!r}: values have to be {what}; they are {', '.join(kinds)}",
        key=".".join(map(str, path)),
        expected=what,
        actual=kinds,
    )
