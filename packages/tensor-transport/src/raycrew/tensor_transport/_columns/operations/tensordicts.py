"""Batches as TensorDicts and back, where the package tensordict is installed."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from raycrew.tensor_transport._columns.kinds import RaggedTensor, kind_of
from raycrew.tensor_transport._columns.naming import listed_columns
from raycrew.tensor_transport._columns.table import ColumnTable
from raycrew.tensor_transport.errors import BatchSchemaError, TransportError

if TYPE_CHECKING:
    from tensordict import TensorDict


class TensorDictOperations(ColumnTable):
    """A table that can be made of a TensorDict, and become one."""

    def to_tensordict(self) -> "TensorDict":
        """The batch as a TensorDict of one batch dimension; tensors are not copied.

        Tensors and arrays of numbers become tensors, ragged columns jagged nested tensors, lists and other
        arrays a `NonTensorStack`, and metadata `NonTensorData`. Attributes and a plan of microbatches stay
        behind.

        Raises:
            TransportError: tensordict is not installed.
            BatchSchemaError: A column is packed or a handle, which no TensorDict holds, or metadata has the
                name of a column.
        """
        tensordict = _tensordict()
        items = {key: _item(key, self[key], tensordict) for key in self}
        for key in self.metadata:
            if key in items or not isinstance(key, str):
                message = (
                    f"metadata {key!r} has the name of a column" if key in items else f"{key!r} is no name"
                )
                raise BatchSchemaError(message, key=str(key))
        made = tensordict.TensorDict(items, batch_size=[self.size])
        for key, value in self.metadata.items():
            made.set_non_tensor(key, value)
        return made

    @classmethod
    def from_tensordict(cls, tensordict: "TensorDict", *, metadata_keys: Iterable[str] | None = None) -> Self:
        """The batch that a TensorDict is; tensors are not copied.

        Args:
            tensordict: With at least one batch dimension, whose first one becomes the rows.
            metadata_keys: Which of its objects that are one for all rows are metadata; the others become
                lists with one entry per row. By default all of them are. (A TensorDict may make one object
                of a list of equal ones.)

        Raises:
            TransportError: tensordict is not installed.
            TypeError: It is no TensorDict.
            KeyError: An entry of `metadata_keys` is not there.
            BatchSchemaError: It has no batch dimension, or an entry can't be a column: another TensorDict, a
                tensor of a class of its own, or one that not all of stacked TensorDicts have. (Tensors of
                other lengths in each of them become a ragged column.)
        """
        package = _tensordict()
        if not package.is_tensor_collection(tensordict):
            raise TypeError(f"a TensorDict is needed, not a {type(tensordict).__name__}")
        if not tensordict.batch_dims:
            raise BatchSchemaError("a TensorDict without a batch dimension has no rows")
        keys = _keys(tensordict, package)
        kept = None if metadata_keys is None else set(listed_columns(metadata_keys, keys))
        columns: dict[str, Any] = {}
        metadata: dict[str, Any] = {}
        for key in keys:
            entry = _entry(tensordict, key, package)
            if type(entry) is package.NonTensorData:
                if kept is None or key in kept:
                    metadata[key] = entry.data
                else:
                    columns[key] = [entry.data] * tensordict.batch_size[0]
            elif kept is not None and key in kept:
                raise BatchSchemaError(f"entry {key!r} has one value per row, and is no metadata", key=key)
            else:
                columns[key] = _column(key, entry, package)
        table = ColumnTable(columns, metadata=metadata)
        return table._like(cls, vars(table)["_columns"])  # noqa: SLF001 - a table of this class


def _tensordict() -> Any:
    try:
        import tensordict
    except ImportError as error:
        raise TransportError(
            "tensordict is not installed: install raycrew-tensor-transport[tensordict]"
        ) from error
    return tensordict


def _keys(tensordict: Any, package: Any) -> list[str]:
    """All entries; a lazy stack itself tells only of those that all of its parts have."""
    keys = list(tensordict.keys())
    if isinstance(tensordict, package.LazyStackedTensorDict):
        for key in {key: None for part in tensordict.tensordicts for key in _keys(part, package)}:
            if key not in keys:
                raise BatchSchemaError(f"entry {key!r} is not in all of the stacked TensorDicts", key=key)
    return keys


def _entry(tensordict: Any, key: str, package: Any) -> Any:
    """An entry; those of a stack's parts as rows where they differ in length."""
    try:
        return tensordict.get(key)
    except (RuntimeError, TypeError) as error:
        lazy = isinstance(tensordict, package.LazyStackedTensorDict) and tensordict.stack_dim == 0
        rows = [part.get(key) for part in tensordict.tensordicts] if lazy else []
        shapes = {row.shape[1:] if isinstance(row, torch.Tensor) and row.ndim else None for row in rows}
        if len(shapes) == 1 and None not in shapes:
            return RaggedTensor.from_rows(rows)
        raise BatchSchemaError(f"entry {key!r} is no column: {error}", key=key) from error


def _item(key: str, column: Any, tensordict: Any) -> Any:
    """A column as a TensorDict has it."""
    match column:
        case torch.Tensor():
            return column
        case np.ndarray() if _fits_tensor(column):
            shares = column.flags.writeable and min(column.strides) >= 0 and column.dtype.isnative
            return torch.from_numpy(column if shares else column.astype(column.dtype.newbyteorder("="), "C"))
        case list() | np.ndarray():
            return tensordict.NonTensorStack(*(tensordict.NonTensorData(row) for row in column))
        case RaggedTensor() if isinstance(column.values, torch.Tensor):
            offsets = torch.from_numpy(column.offsets).to(column.device)
            return torch.nested.nested_tensor_from_jagged(column.values, offsets)
    advice = (
        "take its as_tensor() or to_padded()" if kind_of(column).name == "packed" else "localize() it first"
    )
    raise BatchSchemaError(
        f"column {key!r} is a {kind_of(column).name}, which no TensorDict holds: {advice}", key=key
    )


def _fits_tensor(column: np.ndarray[Any, Any]) -> bool:
    """Whether torch has the dtype: it has none for long doubles."""
    return column.dtype.kind in "biufc" and hasattr(torch, column.dtype.name)


def _column(key: str, entry: Any, tensordict: Any) -> Any:
    """An entry of a TensorDict as a column; what is none is refused where columns are checked."""
    if isinstance(entry, tensordict.NonTensorStack):
        return list(entry.tolist())
    if tensordict.is_tensor_collection(entry):
        raise BatchSchemaError(f"entry {key!r} is a TensorDict in another: flatten_keys('.') first", key=key)
    if isinstance(entry, torch.Tensor) and entry.is_nested:
        rows = entry.unbind()
        return RaggedTensor.from_rows(rows) if rows else RaggedTensor(entry.values()[:0], [])
    return entry
