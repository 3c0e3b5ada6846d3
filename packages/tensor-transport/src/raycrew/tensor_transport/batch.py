"""`BatchedDataDict`: columns with one batch dimension, moved without needless copies."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt
import torch

from raycrew.tensor_transport._bytes import Encoded
from raycrew.tensor_transport._columns import (
    ColumnTable,
    Number,
    Padding,
    PadSide,
    bare,
    check_pad_side,
    gather_encoded,
)
from raycrew.tensor_transport._rows import (
    even_bounds,
    row_numbers,
)
from raycrew.tensor_transport.errors import BatchSchemaError
from raycrew.tensor_transport.packing._plan import (
    DynamicBatchingArgs,
    SequencePackingArgs,
    Share,
    check_batch_size,
    dynamic_shares,
    even_rows,
    packed_shares,
)
from raycrew.tensor_transport.protocols import RowHandle

DictT = TypeVar("DictT", bound=Mapping[str, Any])


class BatchedDataDict(ColumnTable, Generic[DictT]):
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

    Raises:
        BatchSchemaError: A column has another number of rows than the batch.
    """

    def __init__(
        self,
        data: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        /,
        *,
        metadata: Mapping[str, Any] | None = None,
        **columns: Any,
    ) -> None:
        super().__init__(data, metadata=metadata, **columns)
        self.micro_batch_indices: list[list[list[int]]] | None = None
        self.micro_batch_lengths: list[list[int]] | None = None
        self.elem_counts_per_gb: list[int] | None = None

    # Rows

    def slice(self, start: int, end: int) -> "SlicedDataDict[DictT]":
        """The rows from `start` up to `end`, as views.

        Raises:
            IndexError: They are not all there.
        """
        if not 0 <= start <= end <= self.size:
            raise IndexError(f"rows {start}..{end} are not within the {self.size} rows of the batch")
        return self._take(SlicedDataDict, slice(start, end))

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
        if self.elem_counts_per_gb is not None:
            batch.elem_counts_per_gb = [end - start]
        return batch

    @overload
    def shard_by_batch_size(
        self, shards: int, batch_size: int | None = None, allow_uneven_shards: bool = False
    ) -> "list[SlicedDataDict[DictT]]": ...

    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        *,
        dynamic_batching_args: DynamicBatchingArgs,
    ) -> "tuple[list[SlicedDataDict[DictT]], list[int]]": ...

    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        *,
        sequence_packing_args: SequencePackingArgs,
    ) -> "tuple[list[SlicedDataDict[DictT]], list[int]]": ...

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> "list[SlicedDataDict[DictT]] | tuple[list[SlicedDataDict[DictT]], list[int]]":
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
            The shards: views where each is one run of rows, else copies. With dynamic batching or packing
            also the rows' numbers in the order in which `concat(shards)` has them: `reorder_data` takes them.

        Raises:
            ValueError: Sizes do not divide, a row is over the token budget, or arguments exclude each other.
        """
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise ValueError("dynamic_batching_args and sequence_packing_args exclude each other")
        if allow_uneven_shards and batch_size is not None:
            raise ValueError("allow_uneven_shards works on the whole batch; leave batch_size out")
        divide = sequence_packing_args is None and not (allow_uneven_shards and dynamic_batching_args is None)
        per_batch = check_batch_size(self.size, shards, batch_size, divide=divide)
        if dynamic_batching_args is not None:
            lengths = self._lengths(self._named(dynamic_batching_args, "input_lengths_key"))
            width = self._width(self._named(dynamic_batching_args, "input_key"))
            return self._deal(dynamic_shares(lengths, shards, per_batch, dynamic_batching_args, width))
        if sequence_packing_args is not None:
            lengths = self._lengths(self._named(sequence_packing_args, "input_lengths_key"))
            return self._deal(packed_shares(lengths, shards, per_batch, sequence_packing_args))
        return [self._take(SlicedDataDict, rows) for rows in even_rows(self.size, shards, per_batch)]

    def _named(self, arguments: Mapping[str, Any], name: str) -> str:
        """The column that an argument names."""
        key = arguments.get(name)
        if key not in self._columns:
            known = ", ".join(self._columns)
            raise ValueError(f"{name} names a column, not {key!r}; there are {known}")
        return str(key)

    def _width(self, key: str) -> int | None:
        """Padded length of a column of tokens; None where its rows have lengths of their own."""
        shape = getattr(bare(self._columns[key]), "shape", None)
        if shape is not None and len(shape) < 2:
            raise BatchSchemaError(
                f"column {key!r} of shape {list(shape)} does not hold tokens of shape (rows, length)",
                key=key,
                expected="(rows, length)",
                actual=tuple(shape),
            )
        return None if shape is None else int(shape[1])

    def _lengths(self, key: str) -> npt.NDArray[np.int64]:
        """A column of lengths, as an array."""
        column = bare(self._columns[key])
        if isinstance(column, RowHandle):
            raise BatchSchemaError(
                f"column {key!r} is a handle, and its values are needed here: localize() it, "
                "or keep it out of remotize()",
                key=key,
            )
        array = column.cpu().numpy() if isinstance(column, torch.Tensor) else np.asarray(column)
        if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
            raise BatchSchemaError(
                f"column {key!r} does not hold one length per row: {array.dtype} of shape {array.shape}",
                key=key,
                expected="integers",
                actual=array.dtype,
            )
        return array.astype(np.int64)

    def _deal(self, shares: Sequence[Share]) -> "tuple[list[SlicedDataDict[DictT]], list[int]]":
        shards: list[SlicedDataDict[DictT]] = []
        for share in shares:
            shard: SlicedDataDict[DictT] = self._take(SlicedDataDict, share.rows)
            shard.micro_batch_indices, shard.micro_batch_lengths = share.bounds, share.lengths
            shard.elem_counts_per_gb = share.counts
            shards.append(shard)
        return shards, [int(row) for share in shares for row in row_numbers(share.rows, self.size)]

    # Microbatches

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
        self, sequence_dim: int = 1, keys: Iterable[str] | None = None
    ) -> "Iterator[SlicedDataDict[DictT]]":
        """The microbatches that dynamic batching planned, truncated to the length of each.

        Args:
            sequence_dim: Which dimension of tensors is the sequence.
            keys: Truncate only these columns.

        Raises:
            ValueError: Nothing was planned, or for several global batches (`get_batch` takes one of them).
        """
        bounds, lengths = self._planned()
        kept = None if keys is None else list(keys)
        return (
            self.slice(start, end).truncate_tensors(sequence_dim, length, kept)
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
        plans = zip(self.micro_batch_indices or [], self.micro_batch_lengths or [], strict=True)
        match list(plans):
            case [(bounds, lengths)]:
                return bounds, lengths
            case []:
                raise ValueError(
                    "no microbatches are planned: shard with dynamic batching or sequence packing"
                )
            case several:
                raise ValueError(
                    f"microbatches are planned for {len(several)} global batches: get_batch() takes one"
                )

    # Several batches

    @classmethod
    def from_batches(
        cls,
        batches: Sequence[Mapping[str, Any]],
        pad_value_dict: Mapping[str, Number] | None = None,
        *,
        pad_side: PadSide | Mapping[str, PadSide] = "right",
    ) -> Self:
        """Join batches, one after another; rows of different lengths are padded to the longest.

        Args:
            batches: At least one, all with the same columns.
            pad_value_dict: What to pad a column with, where it is not 0.
            pad_side: Where to pad, for all columns or per column (the others on the right).

        Returns:
            The batch, with the metadata of all; where two disagree, the first one's.

        Raises:
            BatchSchemaError: Columns are missing, or dtypes differ.
        """
        values, sides = pad_value_dict or {}, pad_side if isinstance(pad_side, Mapping) else {}
        default: PadSide = "right" if isinstance(pad_side, Mapping) else pad_side
        for side in (default, *sides.values()):
            check_pad_side(side)
        return cls._join(batches, lambda key: Padding(values.get(key, 0), sides.get(key, default)))

    @classmethod
    def concat(cls, parts: Sequence[Mapping[str, Any]]) -> Self:
        """Join batches whose rows have equal shapes: what `shard` took apart. Nothing is padded.

        Raises:
            BatchSchemaError: Columns are missing, or dtypes or row shapes differ.
        """
        return cls._join(parts, lambda _: Padding(None))

    def all_gather(
        self,
        group: "torch.distributed.ProcessGroup | None" = None,
        pad_value_dict: Mapping[str, Number] | None = None,
        *,
        pad_side: PadSide | Mapping[str, PadSide] = "right",
    ) -> Self:
        """The batches of all ranks of a process group, joined in rank order as `from_batches` does.

        Batches may differ in size, and rows in length; columns come on the CPU. Every rank has to call it.

        Raises:
            BatchSchemaError: Columns or dtypes differ between ranks.
        """
        header, buffers = self._lay_out()
        gathered = gather_encoded(Encoded(header, buffers), group)
        batches = [type(self).decode(*parts, allow_pickle=True) for parts in gathered]
        return type(self).from_batches(batches, pad_value_dict, pad_side=pad_side)


class SlicedDataDict(BatchedDataDict[DictT]):
    """A part of a larger batch: one rank's share, or a run of rows."""
