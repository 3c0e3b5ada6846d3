"""Several batches made one: joined row after row, or gathered from all ranks."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from raycrew.tensor_transport._bytes import Encoded
from raycrew.tensor_transport._columns.joining import MetadataRules, gather_encoded, join_columns
from raycrew.tensor_transport._columns.kinds import Number, Padding, PadSide, check_pad_side
from raycrew.tensor_transport._columns.naming import refuse_unknown
from raycrew.tensor_transport._columns.table import ColumnTable
from raycrew.tensor_transport._rows import padding_of_joined
from raycrew.tensor_transport.packing import ShardedBatch

if TYPE_CHECKING:
    import torch

Batches: TypeAlias = "Sequence[Mapping[str, Any]] | ShardedBatch[Any]"


class JoiningOperations(ColumnTable):
    """A table that can be made of several."""

    @classmethod
    def from_batches(
        cls,
        batches: Batches,
        pad_value_dict: Mapping[str, Number] | None = None,
        *,
        pad_side: PadSide | Mapping[str, PadSide] = "right",
        metadata: MetadataRules | None = None,
    ) -> Self:
        """Join batches, one after another; rows of different lengths are padded to the longest.

        Args:
            batches: At least one, all with the same columns; one without rows may lack columns.
            pad_value_dict: What to pad a column with, where it is not 0: numbers that its dtype holds.
            pad_side: Where to pad, for all columns or per column (the others on the right).
            metadata: What becomes of metadata that several batches have: `same`: they have to agree; `first`:
                the first one's; `list`: the list of all values, in order; `concat`: lists, joined; `sum`,
                `min`, `max`, or `mean` (each batch counts as much as it has rows): of numbers, tensors,
                arrays, or mappings of these; a function of the list of their values; or a rule for each key,
                and within a mapping for each of its keys (the others have to agree). What only some batches
                have is kept. By default the class's `metadata_rules`.

        Raises:
            ValueError: A rule, a side, or a column that is named here is unknown.
            BatchSchemaError: Columns are missing, dtypes or metadata differ, or a dtype does not hold the
                padding.
        """
        parts = _listed(batches)
        values, sides = pad_value_dict or {}, pad_side if isinstance(pad_side, Mapping) else {}
        default: PadSide = "right" if isinstance(pad_side, Mapping) else pad_side
        for side in (default, *sides.values()):
            check_pad_side(side)
        if columns := {key: None for part in parts for key in part}:
            refuse_unknown(values, columns, "pad_value_dict")
            refuse_unknown(sides, columns, "pad_side")
        return cls._join(parts, lambda key: Padding(values.get(key, 0), sides.get(key, default)), metadata)

    @classmethod
    def concat(cls, parts: Batches, *, metadata: MetadataRules | None = None) -> Self:
        """Join batches whose rows have equal shapes: what `shard` took apart. Nothing is padded.

        Args:
            parts: At least one; one without rows may lack columns.
            metadata: As for `from_batches`.

        Raises:
            BatchSchemaError: Columns are missing, or dtypes, row shapes or metadata differ.
        """
        return cls._join(_listed(parts), lambda _: Padding(None), metadata)

    def all_gather(
        self,
        group: "torch.distributed.ProcessGroup | None" = None,
        pad_value_dict: Mapping[str, Number] | None = None,
        *,
        pad_side: PadSide | Mapping[str, PadSide] = "right",
        metadata: MetadataRules | None = None,
    ) -> Self:
        """The batches of all ranks of a process group, joined in rank order as `from_batches` does.

        Batches may differ in size, and rows in length; columns come on the CPU. Every rank has to call it.

        Raises:
            BatchSchemaError: Columns, dtypes or metadata differ between ranks, or another rank's batch can't
                be sent: every rank raises.
            UnsupportedTensorError: This rank's can't be sent.
        """
        gathered = gather_encoded(lambda: Encoded(*self._lay_out()), group)
        batches = [type(self).decode(*parts, allow_pickle=True) for parts in gathered]
        return type(self).from_batches(batches, pad_value_dict, pad_side=pad_side, metadata=metadata)

    @classmethod
    def _join(
        cls,
        parts: Sequence[Mapping[str, Any]],
        padding: Callable[[str], Padding],
        metadata: MetadataRules | None = None,
    ) -> Self:
        for i, part in enumerate(parts):
            if not isinstance(part, Mapping):
                raise TypeError(f"batches are joined, and part {i} is a {type(part).__name__}")
        tables = [part if isinstance(part, ColumnTable) else ColumnTable(part) for part in parts]
        joined = cls.__new__(cls)
        vars(joined).update(
            cls._joined_attributes(tables, metadata),
            metadata=cls._joined_metadata(tables, metadata),
            _columns=join_columns([vars(table)["_columns"] for table in tables], padding),
        )
        padded = padding_of_joined([(table.size, table.padding_rows) for table in tables])
        if padded is not None:
            joined.padding_rows = padded
        return joined


def _listed(batches: Batches) -> Sequence[Mapping[str, Any]]:
    """The batches; what `shard_by_batch_size` gave counts as its shards."""
    if isinstance(batches, Mapping):
        raise TypeError("batches are joined: pass a list of them, not one batch")
    return batches.shards if isinstance(batches, ShardedBatch) else list(batches)
