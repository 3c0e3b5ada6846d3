"""One normaliser for every way to name rows."""

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from raycrew.tensor_transport._rows.arrays import refuse_special_array
from raycrew.tensor_transport._rows.counts import whole_number

RowIndex: TypeAlias = slice | range | Sequence[int] | Sequence[bool] | torch.Tensor | npt.NDArray[np.generic]
Rows: TypeAlias = slice | npt.NDArray[np.int64]
_TRUTHS = {bool, np.bool_}


def normalize_rows(index: RowIndex, size: int) -> Rows:
    """Turn any row index into a forward slice or an array of row numbers in [0, size).

    Args:
        index: A slice or range; integers (negative ones count from the end) or one boolean per row, as a
            list, tuple, numpy array or tensor of one dimension.
        size: Number of rows.

    Returns:
        A `slice` with explicit bounds and a positive step for a slice or range that runs forwards (it can be
        taken as a view), an int64 array for everything else.

    Raises:
        IndexError: A row does not exist, or a mask has another length than the batch.
        TypeError: Not a row index: a bare integer, floats, several dimensions, truth values among integers,
            or a tensor of uint8, which may be either.
    """
    if isinstance(index, slice):
        return _from_range(range(*index.indices(size)))
    if isinstance(index, range):
        _check_bounds(np.array([index[0], index[-1]] if index else [], dtype=np.int64), size)
        return (
            _from_range(index)
            if not index or min(index[0], index[-1]) >= 0
            else _from_array(np.array(index), size)
        )
    return _from_array(_as_array(index), size)


def check_permutation(index: RowIndex, size: int) -> npt.NDArray[np.int64]:
    """The index as row numbers, each of the `size` rows exactly once.

    Raises:
        ValueError: A row is missing or named twice.
    """
    rows = row_numbers(normalize_rows(index, size), size)
    if len(rows) != size or not _is_permutation(rows, size):
        counts = np.bincount(rows, minlength=size)
        missing, twice = np.flatnonzero(counts == 0)[:3].tolist(), np.flatnonzero(counts > 1)[:3].tolist()
        raise ValueError(
            f"not a permutation of {size} rows: {len(rows)} indices, missing {missing}, repeated {twice} "
            "(first three each); use select_indices to drop or repeat rows"
        )
    return rows


def inverse_permutation(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The permutation that undoes `rows`."""
    inverse = np.empty_like(rows)
    inverse[rows] = np.arange(len(rows))
    return inverse


def row_numbers(rows: Rows, size: int) -> npt.NDArray[np.int64]:
    """Normalised rows, written out."""
    return np.arange(*rows.indices(size)) if isinstance(rows, slice) else rows


def count_rows(rows: Rows, size: int) -> int:
    """How many rows are named."""
    return len(range(*rows.indices(size))) if isinstance(rows, slice) else len(rows)


def repeats(rows: Rows, size: int) -> npt.NDArray[np.int64]:
    """The positions at which a row is named that was named before."""
    if isinstance(rows, slice):
        return np.empty(0, dtype=np.int64)
    positions, first = np.arange(len(rows)), np.empty(size, dtype=np.int64)
    first[rows[::-1]] = positions[::-1]  # Of several positions, the one that is assigned last stays.
    return np.flatnonzero(first[rows] != positions)


def padding_within(rows: slice, size: int, padding: int) -> int:
    """How many of a run of rows are among the last `padding` ones of `size`."""
    return sum(row >= size - padding for row in range(*rows.indices(size))[-padding:]) if padding else 0


def padding_of_joined(parts: Sequence[tuple[int, int | None]]) -> int | None:
    """How many of the last rows are padding where batches are joined.

    Args:
        parts: Of each batch its rows, and how many of the last are padding, where that is known.

    Returns:
        None where a batch with rows does not know, or none does, or rows follow padding.
    """
    known = [(size, padding) for size, padding in parts if padding is not None]
    if not known or any(size and padding is None for size, padding in parts):
        return None
    total = 0
    for size, padding in known:
        if total and size != padding:
            return None
        total += padding
    return total


def is_contiguous(rows: Rows) -> TypeGuard[slice]:
    """Whether the rows are one unbroken run."""
    return isinstance(rows, slice) and rows.step in (1, None)


def even_bounds(size: int, parts: int) -> list[tuple[int, int]]:
    """Split `size` rows into `parts` runs whose lengths differ by at most one, longer ones first."""
    parts = whole_number(parts, "a number of parts", least=1)
    base, extra = divmod(size, parts)
    starts = [i * base + min(i, extra) for i in range(parts + 1)]
    return list(itertools.pairwise(starts))


def run_bounds(size: int, parts: int | Sequence[int]) -> list[tuple[int, int]]:
    """Split `size` rows into so many even runs, or into runs of the given sizes.

    Raises:
        ValueError: The sizes do not add up to the number of rows.
    """
    if isinstance(parts, int | np.integer):
        return even_bounds(size, parts)
    if sum(parts) != size or any(each < 0 for each in parts):
        raise ValueError(f"sizes {list(parts)} do not add up to {size} rows")
    return list(itertools.pairwise(itertools.accumulate(parts, initial=0)))


def _is_permutation(rows: npt.NDArray[np.int64], size: int) -> bool:
    return bool((np.bincount(rows, minlength=size) == 1).all())


def _from_range(rows: range) -> Rows:
    if rows.step > 0:
        return slice(rows.start, max(rows.start, rows.stop), rows.step)
    return np.array(rows, dtype=np.int64)


def _as_array(index: object) -> npt.NDArray[np.generic]:
    if isinstance(index, torch.Tensor):
        _check_tensor(index)
        index = index.detach().cpu().numpy()
    elif not isinstance(index, Sequence | np.ndarray) or isinstance(index, str | bytes):
        hint = "; wrap it in a list" if isinstance(index, int | np.integer) else ""
        hint = "; localize() it first" if hasattr(index, "take_rows") else hint
        raise TypeError(
            f"rows are named by a slice, a range, integers or a mask, not by {type(index).__name__}{hint}"
        )
    refuse_special_array(index, "the index of rows")
    kinds: set[type[Any]] = set() if isinstance(index, np.ndarray) else set(map(type, index))
    if kinds & _TRUTHS and kinds - _TRUTHS:
        raise TypeError("rows are named by integers or by one boolean per row, not by both in one list")
    array = np.asarray(index)
    if array.ndim != 1:
        raise TypeError(f"rows are named by one dimension of indices, not by shape {array.shape}")
    return array.astype(np.int64) if array.size == 0 and array.dtype != np.bool_ else array


def _check_tensor(index: torch.Tensor) -> None:
    if index.is_meta or index.layout != torch.strided:
        what = "meta" if index.is_meta else "sparse or nested"
        raise TypeError(f"rows are named by a plain tensor of numbers or truth values, not by a {what} one")
    if index.numel() and (index.is_floating_point() or index.is_complex()):
        raise TypeError(f"rows are named by integers or booleans, not by {index.dtype}")
    if index.dtype == torch.uint8 and index.ndim == 1:
        raise TypeError("a tensor of uint8 may be a mask or row numbers: pass tensor.bool() or tensor.long()")


def _from_array(array: npt.NDArray[np.generic], size: int) -> npt.NDArray[np.int64]:
    if array.dtype == np.bool_:
        if len(array) != size:
            raise IndexError(f"a mask of {len(array)} booleans does not fit {size} rows")
        return np.flatnonzero(array)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"rows are named by integers or booleans, not by {array.dtype}")
    _check_bounds(array, size)
    rows = array.astype(np.int64)
    return np.where(rows < 0, rows + size, rows)


def _check_bounds(rows: npt.NDArray[Any], size: int) -> None:
    bad = rows[(rows < -size) | (rows >= size)]
    if len(bad):
        raise IndexError(f"row {bad[0]} is out of range for {size} rows")
