"""Microbatches of rows as packed sequences."""

from collections.abc import Iterable, Mapping

import torch

from raycrew.tensor_transport._columns.kinds import Number, PadSide, check_pad_side
from raycrew.tensor_transport._columns.lengths import named_column, row_lengths
from raycrew.tensor_transport._columns.naming import listed_columns, refuse_unknown
from raycrew.tensor_transport._columns.sequences import PackedSequences, pack_columns
from raycrew.tensor_transport._columns.table import ColumnTable


class SequenceOperations(ColumnTable):
    """A table whose rows can be packed into one sequence."""

    def pack_sequences(
        self,
        keys: Iterable[str],
        input_lengths_key: str,
        *,
        pad_multiple: int = 1,
        pad_value_dict: Mapping[str, Number] | None = None,
        pad_side: PadSide = "right",
    ) -> PackedSequences:
        """The rows as one sequence: their tokens without padding, one row after another.

        It gives `cu_seqlens`, `position_ids`, labels and masks that end with each row, and the way back:
        `unpack()` has the columns as they were, `rows(outputs)` what a model made of the tokens. What lies
        past the length of a padded row is taken to be its padding (`pad_value_dict`).

        Args:
            keys: The columns with one entry per token: tensors of shape (rows, length, ...), or ragged.
            input_lengths_key: The column of lengths.
            pad_multiple: Pad each sequence to a multiple of this, as context parallelism wants it.
            pad_value_dict: What a column is padded with, where it is not 0.
            pad_side: Where the rows of tensors have their padding now; packed ones have it on the right.

        Raises:
            KeyError: A column is not there.
            BatchSchemaError: A column does not hold so many tokens per row, or not the padding.
            ValueError: No column is named, or an argument makes no sense.
        """
        chosen = listed_columns(keys, self._columns)
        if not chosen:
            raise ValueError("name at least one column of tokens")
        check_pad_side(pad_side)
        refuse_unknown(pad_value_dict or {}, chosen, "pad_value_dict")
        key = named_column(self._columns, {"input_lengths_key": input_lengths_key}, "input_lengths_key")
        lengths = torch.from_numpy(row_lengths(self._columns[key], key))
        columns = {name: self[name] for name in chosen}
        return pack_columns(
            columns, lengths, pad_multiple=pad_multiple, pad_values=pad_value_dict or {}, pad_side=pad_side
        )
