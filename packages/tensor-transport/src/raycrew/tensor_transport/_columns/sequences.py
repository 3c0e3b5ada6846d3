"""The sequences of a microbatch, one after another in one: what attention kernels and losses need of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from raycrew.tensor_transport._bytes import raw
from raycrew.tensor_transport._columns.equality import equal
from raycrew.tensor_transport._columns.kinds import Number, PadSide, RaggedTensor, check_pad_value
from raycrew.tensor_transport._columns.naming import listed_columns
from raycrew.tensor_transport._rows import whole_number
from raycrew.tensor_transport.errors import BatchSchemaError

_MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class PackedSequences:
    """Columns of tokens without rows: each sequence begins where the one before it ends.

    Made by `BatchedDataDict.pack_sequences`. Positions are on the device of the columns, lengths on the CPU.

    Attributes:
        columns: Tensors of shape (tokens, *inner).
        lengths: Tokens of each sequence, int64.
        padded_lengths: Its tokens with the padding that follows them, int64.
    """

    columns: dict[str, torch.Tensor]
    lengths: torch.Tensor
    padded_lengths: torch.Tensor
    _device: torch.device = field(repr=False)
    _widths: dict[str, int | None] = field(repr=False)
    _pad_values: dict[str, Number] = field(repr=False)
    _pad_side: PadSide = field(repr=False)
    _other_tails: frozenset[str] = field(repr=False)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """Sums of the lengths, from 0 on: int32 of shape (sequences + 1,).

        They count no padding. Where `pad_multiple` is larger than 1, the columns have some, and
        `cu_seqlens_padded` says where sequences begin in them.
        """
        return _sums(self.lengths).to(self._device)

    @property
    def cu_seqlens_padded(self) -> torch.Tensor:
        """Where each sequence begins in the columns, and where the last one ends, padding included: int32."""
        return _sums(self.padded_lengths).to(self._device)

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest sequence, padding included."""
        return int(self.padded_lengths.max()) if len(self.padded_lengths) else 0

    @property
    def position_ids(self) -> torch.Tensor:
        """Of each token its position in its sequence, int64; padding goes on counting."""
        return _within(self.padded_lengths).to(self._device)

    @property
    def token_mask(self) -> torch.Tensor:
        """Which tokens are no padding."""
        return self._nth_before_end(0)

    @property
    def label_mask(self) -> torch.Tensor:
        """Which tokens are followed by another one of their sequence, and so have a label."""
        return self._nth_before_end(1)

    def shifted(self, values: str | torch.Tensor, fill: Number = 0) -> torch.Tensor:
        """Of each token what the next one of its sequence has; `fill` where there is none.

        Args:
            values: A column, or a tensor of shape (tokens, *inner): token ids for labels, a mask of tokens
                for the mask of their labels.
            fill: For the last token of a sequence, and for padding.

        Raises:
            KeyError: There is no such column.
            BatchSchemaError: The dtype does not hold `fill`.
            ValueError: The tensor has another number of tokens.
        """
        tensor = self._values(values)
        check_pad_value(fill, tensor.dtype, values if isinstance(values, str) else "values")
        shifted = torch.full_like(tensor, fill)
        there = self.label_mask.nonzero().flatten().to(tensor.device)
        raw(shifted)[there] = raw(tensor)[there + 1]
        return shifted

    def labels(
        self, key: str = "input_ids", *, mask: str | torch.Tensor | None = None, ignore_index: int = -100
    ) -> torch.Tensor:
        """The token that each token has to predict; `ignore_index` where there is none, or it does not count.

        Args:
            key: The column of tokens.
            mask: A column or tensor that is 0 for tokens that are not to be predicted, as those of a prompt.
            ignore_index: As the loss knows it.

        Raises:
            KeyError: There is no such column.
            BatchSchemaError: The dtype of the tokens does not hold `ignore_index`.
            ValueError: The mask has another number of tokens, or another shape than tokens.
        """
        labels = self.shifted(key, ignore_index)
        if mask is None:
            return labels
        counts = self.shifted(mask)
        if counts.shape not in (labels.shape, labels.shape[:1]):
            raise ValueError(
                f"a mask of shape {tuple(counts.shape)} is not one for labels of shape {tuple(labels.shape)}"
            )
        for _ in range(labels.ndim - counts.ndim):
            counts = counts.unsqueeze(-1)
        return labels.masked_fill(counts == 0, ignore_index)

    def rows(self, values: str | torch.Tensor) -> RaggedTensor:
        """A column, or what a model made of each token, as rows: a copy only where there is padding.

        Raises:
            KeyError: There is no such column.
            ValueError: The tensor has another number of tokens.
        """
        tensor = self._values(values)
        if not self.lengths.equal(self.padded_lengths):
            tensor = tensor[self.token_mask.to(tensor.device)]
        return RaggedTensor(tensor, self.lengths)

    def unpack(self) -> dict[str, Any]:
        """The columns as they were before: padded ones with their padding, ragged ones without.

        Raises:
            ValueError: A column had something else than its padding past the lengths, which is not kept.
        """
        if self._other_tails:
            raise ValueError(
                f"columns {', '.join(sorted(self._other_tails))} were not padded with what "
                "pack_sequences() was told: name it in pad_value_dict, and cut what is no padding"
            )
        found: dict[str, Any] = {}
        for key, width in self._widths.items():
            rows = self.rows(key)
            value, side = self._pad_values[key], self._pad_side
            found[key] = rows if width is None else rows.to_padded(value, pad_side=side, length=width)
        return found

    def _nth_before_end(self, n: int) -> torch.Tensor:
        lengths = self.lengths.repeat_interleave(self.padded_lengths)
        return (_within(self.padded_lengths) < lengths - n).to(self._device)

    def _values(self, values: str | torch.Tensor) -> torch.Tensor:
        if isinstance(values, str):
            return self.columns[listed_columns([values], self.columns)[0]]
        tokens = int(self.padded_lengths.sum())
        if not values.ndim or len(values) != tokens:
            raise ValueError(
                f"values of shape {tuple(values.shape)} are not one for each of the {tokens} tokens"
            )
        return values


def pack_columns(
    columns: Mapping[str, Any],
    lengths: torch.Tensor,
    *,
    pad_multiple: int,
    pad_values: Mapping[str, Number],
    pad_side: PadSide,
) -> PackedSequences:
    """Columns of tokens, each padded or ragged, as packed sequences.

    Raises:
        BatchSchemaError: A column does not hold so many tokens per row.
        ValueError: `pad_multiple` is not positive, or there are too many tokens.
    """
    pad_multiple = whole_number(pad_multiple, "what sequences are padded to a multiple of", least=1)
    padded = -(-lengths // pad_multiple) * pad_multiple
    if int(padded.sum()) > _MOST_TOKENS:
        raise ValueError(f"{int(padded.sum())} tokens are more than 2**31 - 1, and can't be packed into one")
    packed: dict[str, torch.Tensor] = {}
    widths: dict[str, int | None] = {}
    others: set[str] = set()
    values = {key: pad_values.get(key, 0) for key in columns}
    for key, column in columns.items():
        rows = _rows(key, column, lengths, pad_side)
        check_pad_value(values[key], rows.dtype, key)
        packed[key] = _spread(rows, padded, values[key])
        widths[key] = None if isinstance(column, RaggedTensor) else int(column.shape[1])
        if widths[key] is not None and not equal(
            column, rows.to_padded(values[key], pad_side=pad_side, length=widths[key])
        ):
            others.add(key)
    devices = {tensor.device for tensor in packed.values()}
    if len(devices) > 1:
        raise BatchSchemaError(f"columns on several devices do not pack: {sorted(map(str, devices))}")
    return PackedSequences(
        packed, lengths, padded, devices.pop(), widths, values, pad_side, frozenset(others)
    )


def _rows(key: str, column: Any, lengths: torch.Tensor, pad_side: PadSide) -> RaggedTensor:
    if getattr(column, "device", None) == torch.device("meta"):
        raise BatchSchemaError(f"column {key!r} is on the meta device: there are no tokens to pack", key=key)
    if isinstance(column, RaggedTensor) and isinstance(column.values, torch.Tensor):
        if not column.lengths.equal(lengths):
            raise BatchSchemaError(f"column {key!r} is ragged, and its rows have other lengths", key=key)
        return column
    if not isinstance(column, torch.Tensor) or column.ndim < 2:
        raise BatchSchemaError(
            f"column {key!r} holds no tokens: a tensor of shape (rows, length, ...) or ragged ones do; "
            "localize() handles first",
            key=key,
            actual=type(column).__name__,
        )
    try:
        return RaggedTensor.from_padded(column, lengths, pad_side=pad_side)
    except ValueError as error:
        raise BatchSchemaError(f"column {key!r}: {error}", key=key) from error


def _spread(rows: RaggedTensor, padded: torch.Tensor, pad_value: Number) -> torch.Tensor:
    """Rows one after another, each with its padding; in place where there is none."""
    tensor: torch.Tensor = rows.values
    if rows.lengths.equal(padded):
        return tensor
    spread = tensor.new_full((int(padded.sum()), *tensor.shape[1:]), pad_value)
    there = _within(padded) < rows.lengths.repeat_interleave(padded)
    raw(spread)[there.to(tensor.device)] = raw(tensor)
    return spread


def _sums(lengths: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths.numpy())]).astype(np.int32))


def _within(lengths: torch.Tensor) -> torch.Tensor:
    starts = torch.cumsum(lengths, 0) - lengths
    return torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
