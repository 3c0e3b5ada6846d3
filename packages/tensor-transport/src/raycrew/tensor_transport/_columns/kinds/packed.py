"""`PackedTensor`: tensors of any length (or none) per row, joined only when a model wants them."""

from collections.abc import Iterator, Sequence
from typing import Any, Self, TypeAlias

import numpy as np
import torch

from raycrew.tensor_transport._bytes import reduce_through
from raycrew.tensor_transport._columns.kinds.padding import (
    Number,
    PadSide,
    check_pad_side,
    check_pad_value,
    padded_to,
)
from raycrew.tensor_transport._rows import RowIndex, Rows, normalize_rows, row_numbers
from raycrew.tensor_transport.protocols import RowHandle

Segment: TypeAlias = torch.Tensor | RowHandle
PackedRow: TypeAlias = Segment | Sequence[Segment] | None


class PackedTensor:
    """One tensor, several or none per row, for example the image patches of each sample.

    Args:
        tensors: One entry per row: a tensor, a handle on one (`remotize` puts it there), several of these
            (the row's segments, as a list or tuple), or None where a row has nothing. Or one tensor for a
            single row.
        dim_to_pack: The dimension along which `as_tensor` joins them; all others are equal (see `padded`).

    Attributes:
        tensors: As given; several segments as a tuple, an empty one as None.
        dim_to_pack: As given.

    Raises:
        ValueError: Tensors that could not be joined: dtypes, devices or other dimensions differ; or
            `dim_to_pack` is no integer.

    Examples:
        >>> images = PackedTensor([torch.zeros(3, 2), None, torch.ones(1, 2)])  # patches of each sample
        >>> images.lengths, images.as_tensor().shape
        ([3, 0, 1], torch.Size([4, 2]))
    """

    def __init__(self, tensors: torch.Tensor | Sequence[PackedRow], dim_to_pack: int = 0) -> None:
        self.tensors: list[Any] = [tensors] if isinstance(tensors, torch.Tensor) else list(map(_row, tensors))
        self.dim_to_pack = _dimension(dim_to_pack)
        _check_alike(self.tensors, dim_to_pack)

    @classmethod
    def padded(
        cls,
        tensors: Sequence[PackedRow],
        dim_to_pack: int = 0,
        *,
        pad_value: Number = 0,
        pad_side: PadSide = "right",
    ) -> Self:
        """Rows whose other dimensions may differ: all are padded to the largest of each.

        Tensors that have the common shape are not copied.

        Raises:
            ValueError: dtypes, devices or numbers of dimensions differ, the dtype does not hold the padding,
                or a handle would have to be padded.
        """
        check_pad_side(pad_side)
        dim_to_pack = _dimension(dim_to_pack)
        rows = [_row(tensor) for tensor in tensors]
        every = [segment for row in rows for segment in segments_of(row)]
        if len({(segment.dtype, segment.ndim) for segment in every}) > 1:
            return cls(rows, dim_to_pack)  # It says what differs.
        common = [max(lengths) for lengths in zip(*(segment.shape for segment in every), strict=True)]

        def pad(segment: Any) -> Any:
            shape = list(common)
            shape[dim_to_pack] = segment.shape[dim_to_pack]
            if list(segment.shape) == shape:
                return segment
            if not isinstance(segment, torch.Tensor):
                raise ValueError("a row is a handle, and can't be padded: localize() it first")
            check_pad_value(pad_value, segment.dtype, "rows")
            return padded_to(segment, shape, pad_value, pad_side)

        return cls([map_row(row, pad) for row in rows], dim_to_pack)

    def as_tensor(self, device: str | torch.device | None = None) -> torch.Tensor | None:
        """All tensors joined along `dim_to_pack`, on a device if one is named; None if there are none.

        Raises:
            TypeError: A row is a handle.
        """
        present = [tensor if device is None else tensor.to(device) for tensor in self._here()]
        return torch.cat(present, dim=self.dim_to_pack) if present else None

    def to_padded(self, pad_value: Number = 0, *, pad_side: PadSide = "right") -> torch.Tensor:
        """One tensor of shape (rows, *common): each row's tensors joined, and padded to the longest row.

        A row of None is all padding; `lengths` tells what is not.

        Raises:
            ValueError: No row has a tensor: dtype and shape are unknown. Or the dtype does not hold the
                padding.
            TypeError: A row is a handle.
        """
        check_pad_side(pad_side)
        here = self._here()
        if not here:
            raise ValueError("no row has a tensor: dtype and shape are unknown")
        check_pad_value(pad_value, here[0].dtype, "rows")
        shape = list(here[0].shape)
        shape[self.dim_to_pack] = max(self.lengths)
        stacked = here[0].new_full((len(self), *shape), pad_value)
        for number, tensors in enumerate(self.tensors):
            if segments := segments_of(tensors):
                joined = torch.cat(segments, dim=self.dim_to_pack)
                stacked[number] = padded_to(joined, shape, pad_value, pad_side)
        return stacked

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, row: int) -> Any:
        return self.tensors[row]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tensors)

    def __repr__(self) -> str:
        shapes = [None if row is None else _shapes(row) for row in self.tensors[:3]]
        more = ", ..." if len(self) > len(shapes) else ""
        shown = ", ".join(map(str, shapes)) + more
        return f"PackedTensor({len(self)} rows, {shown}, dim_to_pack={self.dim_to_pack})"

    @property
    def dtype(self) -> torch.dtype | None:
        """Of all tensors; None where no row has one."""
        first = next((segment for row in self.tensors for segment in segments_of(row)), None)
        return None if first is None else first.dtype

    @property
    def segment_lengths(self) -> list[list[int]]:
        """Of each row the lengths of its tensors along `dim_to_pack`."""
        return [[segment.shape[self.dim_to_pack] for segment in segments_of(row)] for row in self.tensors]

    @property
    def lengths(self) -> list[int]:
        """Of each row the length of its tensors, joined along `dim_to_pack`; 0 for None."""
        return [sum(lengths) for lengths in self.segment_lengths]

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(segment.nbytes for row in self.tensors for segment in segments_of(row))

    def slice(self, indices: RowIndex) -> Self:
        """Some rows; the tensors are not copied."""
        return self.take(normalize_rows(indices, len(self)))

    def take(self, rows: Rows) -> Self:
        """Some rows, already normalised."""
        return type(self)([self.tensors[i] for i in row_numbers(rows, len(self)).tolist()], self.dim_to_pack)

    def to(self, device: str | torch.device, *, non_blocking: bool = False) -> Self:
        """The same rows on a device; handles stay where they are."""

        def moved(segment: Any) -> Any:
            here = isinstance(segment, torch.Tensor)
            return segment.to(device, non_blocking=non_blocking) if here else segment

        return type(self)([map_row(row, moved) for row in self.tensors], self.dim_to_pack)

    @classmethod
    def empty_like(cls, other: "PackedTensor") -> Self:
        """As many rows as another's, with nothing in them."""
        return cls([None] * len(other), other.dim_to_pack)

    @classmethod
    def concat(cls, parts: "Sequence[PackedTensor]") -> Self:
        """The rows of several, one after another.

        Raises:
            ValueError: They are packed along different dimensions.
        """
        return cls([tensor for part in parts for tensor in part.tensors], common_dim(parts))

    @classmethod
    def flattened_concat(cls, parts: "Sequence[PackedTensor]") -> Self:
        """One row per part, holding all of the part's tensors joined."""
        return cls.concat([cls([part.as_tensor()], part.dim_to_pack) for part in parts])

    def _here(self) -> list[torch.Tensor]:
        every = [segment for row in self.tensors for segment in segments_of(row)]
        if not all(isinstance(segment, torch.Tensor) for segment in every):
            raise TypeError("rows of this column are handles: localize() them first")
        return every

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return reduce_through(type(self), self.tensors, self.dim_to_pack)


def segments_of(row: Any) -> tuple[Any, ...]:
    """The tensors of a row."""
    return row if isinstance(row, tuple) else () if row is None else (row,)


def map_row(row: Any, change: Any) -> Any:
    """A row with every tensor changed."""
    return tuple(map(change, row)) if isinstance(row, tuple) else None if row is None else change(row)


def common_dim(parts: Sequence[PackedTensor]) -> int:
    """The dimension along which all are packed.

    Raises:
        ValueError: They differ.
    """
    if not parts:
        raise ValueError("nothing to join: at least one packed column is needed")
    dims = {part.dim_to_pack for part in parts}
    if len(dims) != 1:
        raise ValueError(f"tensors packed along different dimensions {sorted(dims)} do not join")
    return dims.pop()


def _row(row: Any) -> Any:
    """A row as it is kept."""
    return (tuple(row) or None) if isinstance(row, list | tuple) else row


def _dimension(dim: object) -> int:
    if isinstance(dim, bool) or not isinstance(dim, int | np.integer):
        raise ValueError(f"dim_to_pack is the number of a dimension, not {dim!r}")
    return int(dim)


def _shapes(row: Any) -> Any:
    return [list(segment.shape) for segment in row] if isinstance(row, tuple) else list(row.shape)


def _check_alike(rows: Sequence[Any], dim: int) -> None:
    present = [(number, segment) for number, row in enumerate(rows) for segment in segments_of(row)]
    for row, tensor in present:
        if not _is_tensor_or_handle(tensor):
            raise ValueError(f"row {row} holds a {type(tensor).__name__}, not a tensor or None")
        if not -tensor.ndim <= dim < tensor.ndim:
            raise ValueError(f"row {row} of shape {tuple(tensor.shape)} has no dimension {dim} to pack")
        first = present[0][1]
        if _signature(tensor, dim) != _signature(first, dim):
            raise ValueError(
                f"row {row} of {tensor.dtype}, shape {tuple(tensor.shape)} does not join {first.dtype}, "
                f"shape {tuple(first.shape)} along dimension {dim}"
            )
    devices = {tensor.device for _, tensor in present if isinstance(tensor, torch.Tensor)}
    if len(devices) > 1:
        raise ValueError(f"tensors on several devices do not join: {sorted(map(str, devices))}")


def _is_tensor_or_handle(value: object) -> bool:
    return isinstance(value, torch.Tensor | RowHandle)


def _signature(tensor: Any, dim: int) -> tuple[Any, ...]:
    shape = list(tensor.shape)
    del shape[dim]
    return tensor.dtype, tensor.ndim, shape
