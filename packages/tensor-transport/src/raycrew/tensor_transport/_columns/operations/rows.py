"""What makes other rows of a batch: chosen, ordered, repeated, padded to a multiple."""

from typing import Self

import numpy as np

from raycrew.tensor_transport._columns.kinds import transform
from raycrew.tensor_transport._columns.table import ColumnTable, take_rows
from raycrew.tensor_transport._rows import (
    RowIndex,
    Rows,
    check_permutation,
    inverse_permutation,
    normalize_rows,
)


class RowOperations(ColumnTable):
    """A table whose rows can be chosen, ordered, repeated and padded to a multiple."""

    def select_indices(self, indices: RowIndex) -> Self:
        """The rows that `indices` names, in that order; `batch[indices]` is the same.

        Args:
            indices: Integers (negative ones count from the end) or one boolean per row, as a list, tuple,
                tensor or array: copies. A slice or range: views.

        Raises:
            IndexError: A row does not exist, or a mask has another length than the batch.
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
        self._columns = {key: take_rows(column, rows) for key, column in self._columns.items()}
        for name in self._of_these_rows:
            vars(self).pop(name, None)
        return self

    def _undoing(self, order: RowIndex) -> Rows:
        return inverse_permutation(check_permutation(order, self.size))

    def repeat_interleave(self, num_repeats: int, *, share: bool = False) -> Self:
        """Each row `num_repeats` times in a row.

        Args:
            num_repeats: How often.
            share: Let the repeats of a row share its objects in lists and arrays of objects, and its tensors
                in a `PackedTensor`. By default rows share nothing, with each other nor with this batch: these
                are deep copies. (Rows of tensors and of other arrays are copies in any case.)

        Raises:
            ValueError: `num_repeats` is negative.
        """
        if num_repeats < 0:
            raise ValueError(f"rows can't be repeated {num_repeats} times")
        return self._map(
            lambda column: transform(column, lambda k, c: k.repeat(c, num_repeats, share=share), copies=True)
        )

    def pad_to_divisor(self, divisor: int) -> tuple[Self, int]:
        """A batch whose number of rows is a multiple of `divisor`, and how many rows were added.

        The rows added are the first ones again, as often as it takes; `unpad` drops them. They are rows like
        others to whoever computes a mean over them. Without any to add, columns are not copied.

        Raises:
            ValueError: `divisor` is not positive.
        """
        if divisor < 1:
            raise ValueError(f"rows are padded to a multiple of at least 1, not of {divisor}")
        added = -self.size % divisor
        if not added:
            return self._same_rows(self._columns), 0
        return self._take(type(self), np.arange(self.size + added) % self.size), added

    def unpad(self, added: int) -> Self:
        """The batch without its last `added` rows, as views: what `pad_to_divisor` was given.

        Raises:
            ValueError: There are fewer rows.
        """
        if not 0 <= added <= self.size:
            raise ValueError(f"{added} rows can't be dropped from a batch of {self.size}")
        return self._take(type(self), slice(0, self.size - added, 1)) if added else self.copy()
