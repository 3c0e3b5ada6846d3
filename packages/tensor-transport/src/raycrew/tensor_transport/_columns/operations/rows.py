"""What makes other rows of a batch: chosen, ordered, repeated, padded to a multiple."""

from collections.abc import Iterable
from typing import Any, Self

import numpy as np

from raycrew.tensor_transport._columns.kinds import transform
from raycrew.tensor_transport._columns.naming import listed_columns
from raycrew.tensor_transport._columns.table import ColumnTable, take_columns
from raycrew.tensor_transport._rows import (
    RowIndex,
    Rows,
    check_permutation,
    inverse_permutation,
    normalize_rows,
    whole_number,
)
from raycrew.tensor_transport.errors import BatchSchemaError


class RowOperations(ColumnTable):
    """A table whose rows can be chosen, ordered, repeated and padded to a multiple."""

    def select_indices(self, indices: RowIndex) -> Self:
        """The rows that `indices` names, in that order; `batch[indices]` is the same.

        Args:
            indices: Integers (negative ones count from the end) or one boolean per row, as a list, tuple,
                tensor or array: copies. A slice or range: views. Objects (in lists and arrays of objects) and
                tensors of a `PackedTensor` are those of this batch; a row named again has deep copies.

        Raises:
            IndexError: A row does not exist, or a mask has another length than the batch.
            BatchSchemaError: An object in a row that is named again can't be copied.
        """
        return self._take(type(self), normalize_rows(indices, self.size))

    def apply_order(self, order: RowIndex) -> Self:
        """All rows in another order: row `order[i]` comes as the i-th. `undo_order` undoes it.

        Raises:
            ValueError: `order` is no permutation of the rows.
            IndexError: A row does not exist.
        """
        return self._take(type(self), check_permutation(order, self.size))

    def undo_order(self, order: RowIndex) -> Self:
        """The rows as they were before `apply_order(order)`: the i-th row goes to position `order[i]`.

        It also puts back in order what `shard_by_batch_size` sharded, which returns its order.

        Raises:
            ValueError: `order` is no permutation of the rows.
            IndexError: A row does not exist.
        """
        return self._take(type(self), self._undoing(order))

    def reorder_data(self, reordered_indices: RowIndex) -> Self:
        """As `undo_order`, in place: row `i` moves to position `reordered_indices[i]`.

        A plan of microbatches is dropped: it was one for the rows in the order they had.

        Raises:
            ValueError: The indices are no permutation of the rows.
            IndexError: A row does not exist.
        """
        rows = self._undoing(reordered_indices)
        self._columns = take_columns(self._columns, rows, self.size)
        self._forget_rows()
        return self

    def _undoing(self, order: RowIndex) -> Rows:
        return inverse_permutation(check_permutation(order, self.size))

    def repeat_interleave(self, num_repeats: int, *, share: bool | Iterable[str] = False) -> Self:
        """Each row `num_repeats` times in a row.

        Args:
            num_repeats: How often.
            share: Columns in which the repeats of a row share its objects (in lists and arrays of objects) or
                its tensors (in a `PackedTensor`), such as images; or True for all. In the others rows share
                nothing, with each other nor with this batch: these are deep copies. (Rows of tensors and of
                other arrays are copies in any case.)

        Raises:
            KeyError: A column of `share` is not there.
            ValueError: `num_repeats` is no integer, or negative.
            BatchSchemaError: An object that is not shared can't be copied.
        """
        times = whole_number(num_repeats, "how often rows are repeated")
        if not isinstance(share, bool):
            shared = set(listed_columns(share, self._columns))
        else:
            shared = set(self._columns) if share else set()
        repeated = {
            key: _repeated(key, column, times, share=key in shared) for key, column in self._columns.items()
        }
        return self._like(type(self), repeated)

    def pad_to_divisor(self, divisor: int) -> tuple[Self, int]:
        """A batch whose number of rows is a multiple of `divisor`, and how many rows were added.

        The rows added are the first ones again, as often as it takes: rows like others to whoever computes a
        mean over them, with deep copies of their objects. The batch remembers how many it has
        (`padding_rows`), also when it is padded once more, and `unpad` drops them; runs of its rows
        (`batch[2:]`, `shard`) remember how many of these are among them, and `concat` puts that together.
        Without any to add, columns are not copied, else all are. A batch without rows stays without.

        Raises:
            ValueError: `divisor` is no positive integer.
            BatchSchemaError: An object in a row that comes again can't be copied.
        """
        added = -self.size % whole_number(divisor, "what rows are padded to a multiple of", least=1)
        rows = np.arange(self.size + added) % max(self.size, 1)
        padded = self._take(type(self), rows) if added else self._same_rows(self._columns)
        padded.padding_rows = (self.padding_rows or 0) + added
        return padded, added

    def unpad(self, added: int | None = None) -> Self:
        """The batch without its last `added` rows, as views; what `pad_to_divisor` added, by default.

        Args:
            added: The `padding_rows` of the batch that this one was made from row by row, as results are;
                batches made of rows by number, with rows behind padding, or joined with ones that don't know,
                don't know of padding. A batch that does still knows of the rest.

        Raises:
            ValueError: There are fewer rows, or this batch knows of no padding.
        """
        if added is None and self.padding_rows is None:
            raise ValueError(
                "this batch is not what pad_to_divisor() gave: pass unpad() the padding_rows of that one, or "
                "call it on each batch before they are joined"
            )
        added = whole_number(self.padding_rows if added is None else added, "how many rows are dropped")
        if added > self.size:
            raise ValueError(f"{added} rows can't be dropped from a batch of {self.size}")
        twin = self._take(type(self), slice(0, self.size - added, 1)) if added else self.copy()
        vars(twin).pop("padding_rows", None)
        if (left := (self.padding_rows or 0) - added) > 0:
            twin.padding_rows = left
        return twin


def _repeated(key: str, column: Any, times: int, *, share: bool) -> Any:
    try:
        return transform(column, lambda kind, rows: kind.repeat(rows, times, share=share), copies=True)
    except Exception as error:
        raise BatchSchemaError(
            f"column {key!r} can't be repeated, as copying its rows fails ({error}); name it in share=[...], "
            "so that repeats share them",
            key=key,
        ) from error
