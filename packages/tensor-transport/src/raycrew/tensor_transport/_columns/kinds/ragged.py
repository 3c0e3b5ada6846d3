"""`RaggedTensor`: rows of different lengths, one after another, without padding."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import torch

from raycrew.tensor_transport._bytes import raw, reduce_through
from raycrew.tensor_transport._columns.kinds.padding import (
    Number,
    PadSide,
    check_pad_side,
    check_pad_value,
    join,
)
from raycrew.tensor_transport._rows import Rows, is_contiguous, refuse_special_array, row_numbers
from raycrew.tensor_transport.errors import BatchSchemaError
from raycrew.tensor_transport.protocols import RowHandle


class RaggedTensor:
    """Rows of different lengths, kept one after another.

    Args:
        values: All rows, joined along the first dimension, of shape (sum of lengths, *inner): a tensor, or a
            handle on one (`remotize` puts it there), on which rows can be chosen but not looked at.
        lengths: Length of each row.

    Attributes:
        values: As given.
        lengths: int64, on the CPU.

    Raises:
        ValueError: The lengths do not add up to the values.
    """

    def __init__(self, values: torch.Tensor | RowHandle, lengths: Sequence[int] | torch.Tensor) -> None:
        self.values = cast("Any", values)
        self.lengths = _lengths(lengths)
        if self.values.ndim == 0 or int(self.lengths.sum()) != self.values.shape[0]:
            raise ValueError(
                f"{len(self.lengths)} rows of {int(self.lengths.sum())} elements in all do not fit values of "
                f"shape {tuple(self.values.shape)}"
            )

    @classmethod
    def from_rows(cls, rows: Sequence[torch.Tensor]) -> Self:
        """Join rows of shape (length, *inner), at least one; dtypes and inner shapes are equal.

        Raises:
            BatchSchemaError: They are not.
        """
        if not rows:
            raise ValueError("no rows: dtype and inner shape are unknown; use RaggedTensor(values, [])")
        return cls(join(rows, "rows", None), [len(row) for row in rows])

    @classmethod
    def from_padded(
        cls, padded: torch.Tensor, lengths: Sequence[int] | torch.Tensor, *, pad_side: PadSide = "right"
    ) -> Self:
        """Drop the padding of a tensor of shape (rows, longest, *inner).

        Raises:
            ValueError: A length is larger than the padded rows.
        """
        check_pad_side(pad_side)
        counts = _lengths(lengths)
        if len(counts) != len(padded) or (counts > padded.shape[1]).any():
            raise ValueError(f"lengths {counts.tolist()} do not fit a padded shape of {tuple(padded.shape)}")
        return cls(padded[_mask(counts, padded.shape[1], pad_side).to(padded.device)], counts)

    def to_padded(
        self, pad_value: Number = 0, *, pad_side: PadSide = "right", length: int | None = None
    ) -> torch.Tensor:
        """A tensor of shape (rows, length, *inner), by default as long as the longest row.

        Raises:
            ValueError: A row is longer than `length`, or the dtype does not hold the padding.
            TypeError: The values are a handle.
        """
        check_pad_side(pad_side)
        if not isinstance(self.values, torch.Tensor):
            raise TypeError("the values of these rows are a handle: localize() them first")
        longest = int(self.lengths.max()) if len(self) else 0
        length = longest if length is None else length
        if longest > length:
            raise ValueError(
                f"a row of {longest} does not fit a padded length of {length}; truncate() it first"
            )
        check_pad_value(pad_value, self.dtype, "values")
        padded = self.values.new_full((len(self), length, *self.values.shape[1:]), pad_value)
        raw(padded)[_mask(self.lengths, length, pad_side).to(padded.device)] = raw(self.values)
        return padded

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Any:
        """One row, as a view."""
        row = range(len(self))[row]
        return self._run(*self.offsets[row : row + 2])

    def __iter__(self) -> Iterator[Any]:
        return (self._run(start, stop) for start, stop in pairwise(self.offsets.tolist()))

    def __repr__(self) -> str:
        inner = list(self.values.shape[1:])
        return f"RaggedTensor({len(self)} rows, {self.values.shape[0]} in all, {inner}, {self.values.dtype})"

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Where each row starts, and where the last one ends."""
        return np.concatenate([[0], np.cumsum(self.lengths.numpy())])

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        dtype: torch.dtype = self.values.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Of the values; lengths stay on the CPU."""
        device: torch.device = self.values.device
        return device

    @property
    def nbytes(self) -> int:
        """Of values and lengths."""
        return int(self.values.nbytes) + self.lengths.nbytes

    def take(self, rows: Rows) -> Self:
        """Some rows: views for one unbroken run, else copies."""
        offsets = self.offsets
        if is_contiguous(rows):
            start, stop = offsets[rows.start], offsets[max(rows.start, rows.stop)]
            return type(self)(self._run(start, stop), self.lengths[rows])
        numbers = row_numbers(rows, len(self))
        return self._gather(offsets[numbers], self.lengths.numpy()[numbers])

    def truncate(self, length: int, *, pad_side: PadSide = "right") -> Self:
        """The first `length` elements of every row (the last, for `left`), copied unless all have no more."""
        check_pad_side(pad_side)
        if not len(self) or int(self.lengths.max()) <= length:
            return self
        kept = np.minimum(self.lengths.numpy(), length)
        return self._gather(self.offsets[1:] - kept if pad_side == "left" else self.offsets[:-1], kept)

    def to(self, device: str | torch.device, *, non_blocking: bool = False) -> Self:
        """The same rows with their values on a device; a handle stays where it is."""
        if not isinstance(self.values, torch.Tensor):
            return self
        return type(self)(self.values.to(device, non_blocking=non_blocking), self.lengths)

    @classmethod
    def concat(cls, parts: Sequence[Self], key: str = "rows") -> Self:
        """The rows of several, one after another.

        Raises:
            BatchSchemaError: dtypes or inner shapes differ.
        """
        values = [part.values for part in parts]
        handles = [not isinstance(value, torch.Tensor) for value in values]
        if any(handles) and not all(handles):
            raise BatchSchemaError(
                f"column {key!r}: some parts are handles and some are here; remotize() or localize() all",
                key=key,
            )
        joined = values[0].join_rows(values[1:]) if all(handles) else join(values, key, None)
        return cls(joined, torch.cat([part.lengths for part in parts]))

    def _run(self, start: int, stop: int) -> Any:
        if not isinstance(self.values, torch.Tensor):
            return self.values.take_rows(slice(int(start), int(stop), 1))
        return self.values[start:stop]

    def _gather(self, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Self:
        if not isinstance(self.values, torch.Tensor):
            return type(self)(self.values.take_ranges(starts, lengths), torch.from_numpy(lengths.copy()))
        ends = np.cumsum(lengths)
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
        positions = torch.from_numpy(np.repeat(starts, lengths) + within).to(self.values.device)
        return type(self)(self.values[positions], torch.from_numpy(lengths.copy()))

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return reduce_through(type(self), self.values, self.lengths)


def _lengths(lengths: Sequence[int] | torch.Tensor | npt.NDArray[Any]) -> torch.Tensor:
    """Lengths as int64 on the CPU, in memory of their own."""
    refuse_special_array(lengths, "lengths")
    if isinstance(lengths, np.ndarray):  # torch takes neither another byte order nor one from back to front
        lengths = lengths.astype(lengths.dtype.newbyteorder("="), order="C")
    found = torch.as_tensor(lengths, device="cpu")
    whole = found.numel() == 0 or not (found.is_floating_point() or found.is_complex())
    if found.ndim != 1 or not whole or found.dtype == torch.bool or (found < 0).any():
        raise ValueError(f"lengths are one dimension of non-negative integers, not {found.tolist()}")
    return found.detach().to(torch.int64, copy=True)


def _mask(lengths: torch.Tensor, longest: int, pad_side: PadSide) -> torch.Tensor:
    """Which elements of padded rows are data."""
    position = torch.arange(longest)
    if pad_side == "left":
        return position >= (longest - lengths)[:, None]
    return position < lengths[:, None]
