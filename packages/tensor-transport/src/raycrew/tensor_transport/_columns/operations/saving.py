"""Batches to files and back."""

import inspect
import os
from pathlib import Path
from typing import Self

from raycrew.tensor_transport._columns.encoding import read_columns, write_columns
from raycrew.tensor_transport._columns.operations.columns import ColumnOperations
from raycrew.tensor_transport._columns.table import all_attributes
from raycrew.tensor_transport.errors import DecodeError


class SavingOperations(ColumnOperations):
    """A table that can be saved, and loaded again."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the batch to one file: whole, or not at all.

        The file is of the format safetensors. Tensors, arrays of numbers and the values and lengths of ragged
        columns (`key` and `key/lengths`) are tensors that any reader of the format understands; lists,
        metadata and attributes are JSON in it. A file of that name, or that a link of that name leads to, is
        replaced once the new one is on disk, and keeps its permissions.

        Args:
            path: The file; its folder is there.

        Raises:
            BatchSchemaError: A column, metadata or an attribute holds a handle, or what is neither plain data
                nor a tensor; the error names it, and nothing is written.
            UnsupportedTensorError: A tensor has no plain bytes.
            OSError: It can't be written; what was there before is still there.
            ValueError: What is there is a folder, a device or anything else but a file.
        """
        file = Path(path).resolve()
        if file.exists() and not file.is_file():  # a device would be replaced by the file
            raise ValueError(f"{os.fspath(path)!r} is no regular file: name a file, or a new one in a folder")
        write_columns(file, self._columns, self.size, all_attributes(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """A batch that `save` wrote, with everything writable; nothing is unpickled.

        Columns lie in one piece of memory, which stays for as long as one of them does.

        Raises:
            DecodeError: The file is damaged, incomplete, or no saved batch.
            OSError: It can't be read.
        """
        columns, attributes = read_columns(Path(path))
        if not isinstance(attributes, dict) or not isinstance(attributes.get("metadata"), dict):
            raise DecodeError(f"{path} is no saved batch: it has no metadata")
        for name in attributes:
            if hasattr(inspect.getattr_static(cls, name, None), "__get__"):
                raise DecodeError(f"{path} is no saved batch: its attribute {name!r} would hide a method")
        batch = cls.__new__(cls)
        vars(batch).update(attributes | {"_columns": columns})
        return batch
