"""Which rows go to which shard, and which of them share a microbatch: pure functions of lengths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from raycrew.tensor_transport._rows import Rows, even_bounds
from raycrew.tensor_transport.packing._bins import balance, pack

Lengths = npt.NDArray[np.int64]


class DynamicBatchingArgs(TypedDict):
    """How `shard_by_batch_size` forms microbatches of a token budget.

    Attributes:
        max_tokens_per_microbatch: Rows times padded length of a microbatch.
        sequence_length_round: Padded lengths are a multiple of this; 1 by default.
        input_key: The column of tokens, of shape (rows, length).
        input_lengths_key: The column of lengths.
    """

    max_tokens_per_microbatch: int
    sequence_length_round: NotRequired[int]
    input_key: str
    input_lengths_key: str


class SequencePackingArgs(TypedDict):
    """How `shard_by_batch_size` packs sequences into microbatches.

    Attributes:
        max_tokens_per_microbatch: Tokens of a microbatch.
        input_key: The column of tokens; it is not looked at.
        input_lengths_key: The column of lengths.
        algorithm: One of `packing.ALGORITHMS`; modified first-fit decreasing by default.
        sequence_length_pad_multiple: Each sequence counts as a multiple of this; 1 by default.
    """

    max_tokens_per_microbatch: int
    input_key: NotRequired[str]
    input_lengths_key: str
    algorithm: NotRequired[str]
    sequence_length_pad_multiple: NotRequired[int]


def all_keys(arguments: Any) -> frozenset[str]:
    """All keys of a `TypedDict`."""
    keys: frozenset[str] = arguments.__required_keys__ | arguments.__optional_keys__
    return keys


@dataclass(frozen=True)
class Share:
    """One shard: its rows, and for each global batch how they fall into microbatches.

    Attributes:
        rows: Rows of the batch, global batch by global batch.
        bounds: [start, end) of each microbatch within its global batch.
        lengths: Padded length (or tokens, for packing) of each microbatch.
        counts: Rows in each global batch.
    """

    rows: Rows
    bounds: list[list[list[int]]]
    lengths: list[list[int]]
    counts: list[int]


def check_batch_size(size: int, shards: int, batch_size: int | None, *, divide: bool) -> int:
    """The size of a global batch, by default of all rows.

    Raises:
        ValueError: The rows do not fall into whole global batches or, with `divide`, these into equal shards.
    """
    if shards < 1:
        raise ValueError(f"a batch is sharded into at least one shard, not {shards}")
    if batch_size is None:
        batch_size = size
    if batch_size < min(size, 1) or size % max(batch_size, 1):
        raise ValueError(f"{size} rows are not a multiple of batch_size {batch_size}")
    if divide and batch_size % shards:
        raise ValueError(
            f"a global batch of {batch_size} rows does not divide into {shards} shards: take another "
            "batch_size, sequence_packing_args, or allow_uneven_shards=True (not with batch_size or "
            "dynamic_batching_args)"
        )
    return batch_size


def even_rows(size: int, shards: int, batch_size: int) -> list[Rows]:
    """The rows of each shard: its run of every global batch."""
    if batch_size == size:
        return [slice(start, end, 1) for start, end in even_bounds(size, shards)]
    chunks = np.arange(size).reshape(-1, batch_size)
    return [chunks[:, start:end].reshape(-1) for start, end in even_bounds(batch_size, shards)]


def dynamic_shares(
    lengths: Lengths, shards: int, batch_size: int, args: Mapping[str, Any], longest: int | None = None
) -> list[Share]:
    """Sort each global batch by length, deal it out like cards, and cut it by the token budget.

    All shards cut at the same places, so that ranks take equally many steps with about equally long rows.

    Args:
        lengths: Of each row.
        shards: How many.
        batch_size: Rows in a global batch, a multiple of `shards`.
        args: `DynamicBatchingArgs`.
        longest: No row is padded beyond this.

    Raises:
        ValueError: A single row is over the budget.
    """
    budget, multiple = (
        _positive(args, "max_tokens_per_microbatch"),
        _positive(args, "sequence_length_round", 1),
    )
    rows: list[list[Lengths]] = [[] for _ in range(shards)]
    bounds: list[list[list[int]]] = []
    padded_lengths: list[list[int]] = []
    for first in range(0, len(lengths), max(batch_size, 1)):
        order = np.argsort(lengths[first : first + batch_size], kind="stable") + first
        dealt = order.reshape(-1, shards)
        for shard in range(shards):
            rows[shard].append(dealt[:, shard])
        padded = np.minimum(
            _round_up(lengths[dealt].max(axis=1, initial=0), multiple), longest or np.iinfo(int).max
        )
        cuts = _cut(padded.tolist(), budget)
        bounds.append([[start, end] for start, end in pairwise(cuts)])
        padded_lengths.append([int(padded[end - 1]) for end in cuts[1:]])
    counts = [batch_size // shards] * len(bounds)
    return [Share(_joined(r), bounds, padded_lengths, counts) for r in rows]


def packed_shares(lengths: Lengths, shards: int, batch_size: int, args: Mapping[str, Any]) -> list[Share]:
    """Pack the sequences of each global batch, with as many bins of about as many tokens for every shard.

    Args:
        lengths: Of each row.
        shards: How many.
        batch_size: Rows in a global batch.
        args: `SequencePackingArgs`.

    Raises:
        ValueError: A single row is over the budget, or there are too few rows for the shards.
    """
    budget = _positive(args, "max_tokens_per_microbatch")
    sizes = _round_up(lengths, _positive(args, "sequence_length_pad_multiple", 1))
    algorithm = args.get("algorithm", "modified_first_fit_decreasing")
    rows: list[list[Lengths]] = [[] for _ in range(shards)]
    bounds: list[list[list[list[int]]]] = [[] for _ in range(shards)]
    loads: list[list[list[int]]] = [[] for _ in range(shards)]
    for first in range(0, len(lengths), max(batch_size, 1)):
        packing = pack(sizes[first : first + batch_size], budget, algorithm, bin_count_multiple=shards)
        for shard, bins in enumerate(balance(packing.loads, shards)):
            members = [packing.bins[b] for b in bins]
            ends = np.cumsum([0, *map(len, members)]).tolist()
            rows[shard].append(np.concatenate([np.asarray(m, np.int64) for m in members]) + first)
            bounds[shard].append([[start, end] for start, end in pairwise(ends)])
            loads[shard].append([packing.loads[b] for b in bins])
    return [
        Share(_joined(r), b, t, [len(part) for part in r])
        for r, b, t in zip(rows, bounds, loads, strict=True)
    ]


def _cut(padded: Sequence[int], budget: int) -> list[int]:
    """Where microbatches begin and end, for ascending lengths."""
    cuts = [0]
    for row, length in enumerate(padded):
        if length > budget:
            raise ValueError(
                f"a row of {length} tokens, rounded up, is over max_tokens_per_microbatch={budget}; "
                "truncate it or raise the budget"
            )
        if (row + 1 - cuts[-1]) * length > budget:
            cuts.append(row)
    return [*cuts, len(padded)] if padded else cuts


def _joined(parts: Sequence[Lengths]) -> Lengths:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _round_up(lengths: Lengths, multiple: int) -> Lengths:
    return -(-lengths // multiple) * multiple


def _positive(args: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = args.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{key} is a positive integer, not {value!r}")
    return int(value)


def only_plan(
    bounds: Sequence[list[list[int]]], lengths: Sequence[list[int]]
) -> tuple[list[list[int]], list[int]]:
    """The microbatches of the one global batch that is planned, and the length of each.

    Raises:
        ValueError: None is planned, or several are.
    """
    match list(zip(bounds, lengths, strict=True)):
        case [plan]:
            return plan
        case []:
            raise ValueError(
                "no microbatches are planned: shard with dynamic batching or sequence packing; "
                "a plan does not outlast a selection or reordering of its rows"
            )
        case several:
            raise ValueError(
                f"microbatches are planned for {len(several)} global batches: get_batch() takes one"
            )
