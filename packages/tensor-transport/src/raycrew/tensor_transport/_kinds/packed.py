"""`PackedTensor`: one tensor (or none) per row, of any shape, joined only when a model wants them."""

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch

from raycrew.tensor_transport._bytes import reduce_through
from raycrew.tensor_transport._rows import RowIndex, Rows, normalize_rows, row_numbers
from raycrew.tensor_transport.protocols import RowHandle


class PackedTensor:
    """One tensor or none per row, for example the image patches of each sample.

    Args:
        tensors: One entry per row: a tensor, a handle on one (`remotize` puts it there), or None where a row
            has nothing. Or one tensor for a single row.
        dim_to_pack: The dimension along which `as_tensor` joins them; all others are equal.

    Attributes:
        tensors: As given.
        dim_to_pack: As given.

    Raises:
        ValueError: Tensors that could not be joined: dtypes, devices or other dimensions differ.
    """

    def __init__(
        self, tensors: torch.Tensor | Sequence[torch.Tensor | RowHandle | None], dim_to_pack: int = 0
    ) -> None:
        self.tensors: list[Any] = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        self.dim_to_pack = dim_to_pack
        _check_alike(self.tensors, dim_to_pack)

    def as_tensor(self, device: str | torch.device | None = None) -> torch.Tensor | None:
        """All tensors joined along `dim_to_pack`, on a device if one is named; None if there are none.

        Raises:
            TypeError: A row is a handle.
        """
        if not all(tensor is None or isinstance(tensor, torch.Tensor) for tensor in self.tensors):
            raise TypeError("rows of this column are handles: localize() them first")
        present = [
            tensor if device is None else tensor.to(device) for tensor in self.tensors if tensor is not None
        ]
        return torch.cat(present, dim=self.dim_to_pack) if present else None

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, row: int) -> Any:
        return self.tensors[row]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tensors)

    def __repr__(self) -> str:
        shapes = [None if tensor is None else list(tensor.shape) for tensor in self.tensors[:3]]
        more = ", ..." if len(self) > len(shapes) else ""
        shown = ", ".join(map(str, shapes)) + more
        return f"PackedTensor({len(self)} rows, {shown}, dim_to_pack={self.dim_to_pack})"

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not None)

    def slice(self, indices: RowIndex) -> Self:
        """Some rows; the tensors are not copied."""
        return self.take(normalize_rows(indices, len(self)))

    def take(self, rows: Rows) -> Self:
        """Some rows, already normalised."""
        return type(self)([self.tensors[i] for i in row_numbers(rows, len(self)).tolist()], self.dim_to_pack)

    def to(self, device: str | torch.device, *, non_blocking: bool = False) -> Self:
        """The same rows on a device; handles stay where they are."""
        moved = [
            t.to(device, non_blocking=non_blocking) if isinstance(t, torch.Tensor) else t
            for t in self.tensors
        ]
        return type(self)(moved, self.dim_to_pack)

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
        dims = {part.dim_to_pack for part in parts}
        if len(dims) != 1:
            raise ValueError(f"tensors packed along different dimensions {sorted(dims)} do not join")
        return cls([tensor for part in parts for tensor in part.tensors], dims.pop())

    @classmethod
    def flattened_concat(cls, parts: "Sequence[PackedTensor]") -> Self:
        """One row per part, holding all of the part's tensors joined."""
        return cls.concat([cls([part.as_tensor()], part.dim_to_pack) for part in parts])

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return reduce_through(type(self), self.tensors, self.dim_to_pack)


def _check_alike(tensors: Sequence[Any], dim: int) -> None:
    present = [(row, tensor) for row, tensor in enumerate(tensors) if tensor is not None]
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
