"""`BatchedDataDict`: columns with one batch dimension, moved without needless copies."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, cast

import numpy as np
import torch
from typing_extensions import TypeVar

from raycrew.tensor_transport._columns import (
    BatchIterator,
    JoiningOperations,
    PadSide,
    RowOperations,
    SavingOperations,
    SequenceOperations,
    TensorDictOperations,
    as_wide,
    check_pad_side,
    named_column,
    padded_width,
    refuse_unknown,
    row_checksums,
    row_lengths,
)
from raycrew.tensor_transport._rows import Passes, Rows, even_bounds, row_numbers
from raycrew.tensor_transport.packing import (
    DynamicBatchingArgs,
    SequencePackingArgs,
    ShardedBatch,
    Share,
    all_keys,
    check_batch_size,
    dynamic_shares,
    even_rows,
    only_plan,
    packed_shares,
)

DictT = TypeVar("DictT", bound=Mapping[str, Any], default=Any)


class BatchedDataDict(
    RowOperations,
    SequenceOperations,
    SavingOperations,
    TensorDictOperations,
    JoiningOperations,
    Generic[DictT],
):
    """A mapping of columns whose first dimension is the batch.

    A column is a tensor, a `RaggedTensor`, a `PackedTensor`, a numpy array or a list. What does not have one
    entry per row belongs into `metadata`, which every operation keeps.

    Pickled (as an argument or result of an actor call, or by `ray.put`), large columns travel as out-of-band
    buffers in the memory they have, and small ones together in few aligned buffers. A column that arrives in
    memory which others read too is copied when it is first looked up; slices that are never looked up, and
    columns that are not used, cost nothing. numpy columns stay in place and are read-only; see `writable`.

    Args:
        data: Columns to start with.
        metadata: Anything else that belongs to the batch.
        **columns: More columns.

    Attributes:
        metadata: Kept by slicing, selecting, sharding and pickling; shared, not copied.
        micro_batch_indices: For each global batch, the [start, end) of its microbatches; set by
            `shard_by_batch_size` for dynamic batching and sequence packing.
        micro_batch_lengths: The sequence length (tokens, for packing) of each of those microbatches.
        elem_counts_per_gb: Rows in each global batch; set for sequence packing, where they differ.
        micro_batch_width: The padded length of the tokens that dynamic batching planned.
        padding_rows: How many of the last rows are padding; set by `pad_to_divisor`, used by `unpad`.

    A subclass stays what it is: its parts, selections and joins are of its class, made without its
    `__init__`, and have its attributes as they have the metadata. (Parts of a `BatchedDataDict` are
    `SlicedDataDict`s.)

    Raises:
        BatchSchemaError: A column has another number of rows than the batch.

    Examples:
        >>> batch = BatchedDataDict({"tokens": torch.arange(6).view(3, 2), "text": ["a", "b", "c"]})
        >>> [shard.size for shard in batch.shard(2)]
        [2, 1]
        >>> batch[[2, 0]]["text"]
        ['c', 'a']
    """

    _of_these_rows = (
        "micro_batch_indices",
        "micro_batch_lengths",
        "elem_counts_per_gb",
        "micro_batch_width",
        "padding_rows",
    )
    micro_batch_indices: list[list[list[int]]] | None = None
    micro_batch_lengths: list[list[int]] | None = None
    elem_counts_per_gb: list[int] | None = None
    micro_batch_width: int | None = None

    # Rows

    def slice(self, start: int, end: int) -> "SlicedDataDict[DictT]":
        """The rows from `start` up to `end`, as views.

        Raises:
            IndexError: They are not all there.
        """
        if not 0 <= start <= end <= self.size:
            raise IndexError(f"rows {start}..{end} are not within the {self.size} rows of the batch")
        return self._part(slice(start, end))

    def chunk(self, rank: int, chunks: int) -> "SlicedDataDict[DictT]":
        """The `rank`-th of `chunks` equal runs of rows, as views.

        Raises:
            ValueError: The rows do not divide evenly.
            IndexError: There is no such chunk.
        """
        if chunks < 1 or self.size % chunks:
            raise ValueError(
                f"{self.size} rows do not divide into {chunks} equal chunks; shard(n) takes uneven ones"
            )
        if not 0 <= rank < chunks:
            raise IndexError(f"there is no chunk {rank} of {chunks}")
        length = self.size // chunks
        return self.slice(rank * length, (rank + 1) * length)

    def shard(self, n: int) -> "list[SlicedDataDict[DictT]]":
        """`n` runs of rows whose sizes differ by at most one, as views; `concat` puts them together again."""
        return [self.slice(start, end) for start, end in even_bounds(self.size, n)]

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> "SlicedDataDict[DictT]":
        """The rows of one global batch, with its plan of microbatches.

        Args:
            batch_idx: Which global batch.
            batch_size: Rows in each; may be left out where `shard_by_batch_size` packed sequences.

        Raises:
            ValueError: `batch_size` is needed.
            IndexError: There is no such global batch.
        """
        if self.elem_counts_per_gb is not None:
            ends = np.cumsum([0, *self.elem_counts_per_gb]).tolist()
            self._check_fits(ends[-1])
            if not 0 <= batch_idx < len(self.elem_counts_per_gb):
                raise IndexError(f"there is no global batch {batch_idx} of {len(self.elem_counts_per_gb)}")
            start, end = ends[batch_idx], ends[batch_idx + 1]
        elif batch_size is None:
            raise ValueError("batch_size is needed: the batch was not sharded by sequence packing")
        else:
            start, end = batch_idx * batch_size, (batch_idx + 1) * batch_size
        batch = self.slice(start, end)
        if self.micro_batch_indices is not None and self.micro_batch_lengths is not None:
            batch.micro_batch_indices = [self.micro_batch_indices[batch_idx]]
            batch.micro_batch_lengths = [self.micro_batch_lengths[batch_idx]]
            batch.micro_batch_width = self.micro_batch_width
        if self.elem_counts_per_gb is not None:
            batch.elem_counts_per_gb = [end - start]
        return batch

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> "ShardedBatch[SlicedDataDict[DictT]]":
        """Cut global batches of `batch_size` rows, split each into `shards`, and join what goes to one shard.

        Args:
            shards: How many.
            batch_size: Rows in a global batch; all rows by default. `get_batch` finds a shard's part of one.
            allow_uneven_shards: Allow sizes that differ by at most one; not together with `batch_size`.
            dynamic_batching_args: Sort each global batch by length, so that all shards get rows of about
                equal lengths, and plan microbatches of a token budget, cut alike on all shards; see
                `make_microbatch_iterator_with_dynamic_shapes`.
            sequence_packing_args: Plan microbatches of packed sequences, equally many on all shards and about
                equally many tokens; see `make_microbatch_iterator_for_packable_sequences`.

        Returns:
            The shards, views where each is one run of rows, else copies; and the rows' numbers in the order
            in which `concat(shards)` has them, as `reorder_data` takes them: `shards, order = ...`, or
            `.shards` and `.order`. A group of workers that splits it over its ranks gives each its shard.

        Raises:
            ValueError: Sizes do not divide, a row is over the token budget, an argument is unknown, or
                arguments exclude each other.
        """
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise ValueError("dynamic_batching_args and sequence_packing_args exclude each other")
        if allow_uneven_shards and batch_size is not None:
            raise ValueError("allow_uneven_shards works on the whole batch; leave batch_size out")
        divide = sequence_packing_args is None and not (allow_uneven_shards and dynamic_batching_args is None)
        per_batch = check_batch_size(self.size, shards, batch_size, divide=divide)
        if dynamic_batching_args is not None:
            return self._deal_dynamically(shards, per_batch, dynamic_batching_args)
        if sequence_packing_args is not None:
            refuse_unknown(sequence_packing_args, all_keys(SequencePackingArgs), "sequence_packing_args")
            key = named_column(self._columns, sequence_packing_args, "input_lengths_key")
            lengths = row_lengths(self._columns[key], key)
            return self._deal(packed_shares(lengths, shards, per_batch, sequence_packing_args))
        rows = even_rows(self.size, shards, per_batch)
        return ShardedBatch([self._part(r) for r in rows], self._numbers(rows))

    def _deal_dynamically(
        self, shards: int, batch_size: int, args: DynamicBatchingArgs
    ) -> "ShardedBatch[SlicedDataDict[DictT]]":
        refuse_unknown(args, all_keys(DynamicBatchingArgs), "dynamic_batching_args")
        lengths_key = named_column(self._columns, args, "input_lengths_key")
        lengths = row_lengths(self._columns[lengths_key], lengths_key)
        key = named_column(self._columns, args, "input_key")
        width = padded_width(self._columns[key], key)
        dealt = self._deal(dynamic_shares(lengths, shards, batch_size, args, width))
        for shard in dealt.shards:
            shard.micro_batch_width = (
                width if isinstance(self.borrow(key), torch.Tensor | np.ndarray) else None
            )
        return dealt

    def _deal(self, shares: Sequence[Share]) -> "ShardedBatch[SlicedDataDict[DictT]]":
        shards: list[SlicedDataDict[DictT]] = []
        for share in shares:
            shard = self._part(share.rows)
            shard.micro_batch_indices, shard.micro_batch_lengths = share.bounds, share.lengths
            shard.elem_counts_per_gb = share.counts
            shards.append(shard)
        return ShardedBatch(shards, self._numbers([share.rows for share in shares]))

    def _numbers(self, parts: Sequence[Rows]) -> Sequence[int]:
        if isinstance(parts[0], slice):
            return range(self.size)
        return [row for rows in parts for row in row_numbers(rows, self.size).tolist()]

    def _part(self, rows: Rows) -> "SlicedDataDict[DictT]":
        """Some rows, as a `SlicedDataDict`; those of a subclass as that subclass."""
        plain = type(self) is BatchedDataDict
        return self._take(SlicedDataDict if plain else cast("type[SlicedDataDict[DictT]]", type(self)), rows)

    # Microbatches

    def make_iterator(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epochs: int | None = 1,
        drop_last: bool = False,
    ) -> "BatchIterator[SlicedDataDict[DictT]]":
        """Parts of `batch_size` rows, one or several times over, whose position can be saved and taken up.

        Args:
            batch_size: Rows of a part.
            shuffle: Give the rows in another order each time (copies); otherwise in their own (views).
            seed: The order of a pass depends on this and on the number of the pass alone.
            epochs: How often; None never ends.
            drop_last: Leave out a last part with fewer rows, rather than give it.

        Raises:
            ValueError: A number is negative, or there is no part to give without end.
        """
        these = self.copy()
        passes = Passes(self.size, batch_size, shuffle, seed, drop_last)
        return BatchIterator(
            passes,
            lambda rows: these._part(rows),  # noqa: SLF001 - a batch as this
            epochs,
            lambda: row_checksums(these._columns),  # noqa: SLF001
        )

    def make_microbatch_iterator(self, microbatch_size: int) -> "Iterator[SlicedDataDict[DictT]]":
        """Runs of `microbatch_size` rows, as views.

        Raises:
            ValueError: The rows do not divide evenly.
        """
        count = self.get_microbatch_iterator_len(microbatch_size)
        return (self.slice(i * microbatch_size, (i + 1) * microbatch_size) for i in range(count))

    def get_microbatch_iterator_len(self, microbatch_size: int) -> int:
        """How many microbatches `make_microbatch_iterator` gives."""
        if microbatch_size < 1 or self.size % microbatch_size:
            raise ValueError(f"{self.size} rows are not a multiple of a microbatch size of {microbatch_size}")
        return self.size // microbatch_size

    def make_microbatch_iterator_with_dynamic_shapes(
        self,
        sequence_dim: int = 1,
        keys: Iterable[str] | None = None,
        *,
        pad_side: PadSide = "right",
    ) -> "Iterator[SlicedDataDict[DictT]]":
        """The microbatches that dynamic batching planned, truncated to the length of each.

        Args:
            sequence_dim: Which dimension of tensors and arrays is the sequence.
            keys: Truncate only these columns; by default tensors and arrays that are as wide as that of
                `input_key` was when it was planned, handles and ragged ones (and all tensors, where
                `input_key` was neither).
            pad_side: Where rows have their padding, which is cut.

        Raises:
            ValueError: Nothing was planned, or for several global batches (`get_batch` takes one of them).
        """
        bounds, lengths = self._planned()
        check_pad_side(pad_side)
        columns = {key: self.borrow(key) for key in self} if keys is None else {}
        kept = as_wide(columns, sequence_dim, self.micro_batch_width) if keys is None else list(keys)
        return (
            self.slice(start, end).truncate_tensors(sequence_dim, length, kept, pad_side=pad_side)
            for (start, end), length in zip(bounds, lengths, strict=True)
        )

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """How many microbatches `make_microbatch_iterator_with_dynamic_shapes` gives."""
        return len(self._planned()[0])

    def make_microbatch_iterator_for_packable_sequences(self) -> "Iterator[SlicedDataDict[DictT]]":
        """The microbatches that sequence packing planned, each to be packed into one sequence.

        Raises:
            ValueError: Nothing was planned, or for several global batches (`get_batch` takes one of them).
        """
        return (self.slice(start, end) for start, end in self._planned()[0])

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """How many microbatches there are, and how many tokens the largest one has."""
        bounds, lengths = self._planned()
        return len(bounds), max(lengths, default=0)

    def _planned(self) -> tuple[list[list[int]], list[int]]:
        bounds, lengths = only_plan(self.micro_batch_indices or [], self.micro_batch_lengths or [])
        self._check_fits(bounds[-1][1] if bounds else 0)
        return bounds, lengths

    def _check_fits(self, rows: int) -> None:
        if rows != self.size:
            raise ValueError(f"microbatches are planned for {rows} rows, and the batch has {self.size}")


class SlicedDataDict(BatchedDataDict[DictT]):
    """A part of a larger batch: one rank's share, or a run of rows."""
