"""Splitting what goes to ranks by rows, as a method declares it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raycrew.worker_groups._worker.declared.rows import (
    count_rows,
    cut_rows,
    is_array,
    is_batch,
    is_shardable,
    own_rows,
    pad_rows,
)
from raycrew.worker_groups.protocols import Shardable


@dataclass(frozen=True, slots=True)
class Split:
    """Arguments in equal parts.

    Attributes:
        parts: For each share, what it has of each argument.
        rows: Rows of each share, or None where that is the arguments' own business.
        kept: For each share, how many of its rows are no padding.
    """

    parts: Sequence[Mapping[str, Any]]
    rows: int | None = None
    kept: tuple[int, ...] = ()


def split_rows(
    values: Mapping[str, Any], n: int, *, pad: bool, called: str, axis: str, may_pad: bool = True
) -> Split:
    """Split arguments into `n` shares of as many rows.

    Args:
        values: The arguments by name, at least one.
        n: How many shares.
        pad: Whether to add rows until they divide.
        called: The method, for errors.
        axis: What they are split over, for errors.
        may_pad: Whether the method could be declared so that rows are added.

    Raises:
        TypeError: An argument has no rows, or is a list of batches.
        ValueError: There are no rows, they don't divide, or arguments have different numbers of them.
    """
    if dealt := [name for name, value in values.items() if _is_dealt(value)]:
        if pad or len(dealt) < len(values):
            what = "padded" if pad else f"split beside {', '.join(values.keys() - set(dealt))}"
            raise ValueError(f"{called}: {dealt[0]} is split into shards already, and can't be {what}")
        columns = {name: _shards(f"{called}: {name}", value, n) for name, value in values.items()}
        return Split([{name: column[i] for name, column in columns.items()} for i in range(n)])
    rows = _common_rows(values, called)
    if rows % n and not pad:
        advice = (
            "pad=True on the method adds the first rows again until they do, and drops what comes of them"
            if may_pad
            else f"leave {rows % n} out or add {n - rows % n}: rows added by pad=True would be counted"
        )
        raise ValueError(
            f"{called}: {rows} rows of {', '.join(values)} don't divide among the {n} coordinates of axis "
            f"{axis!r}; {advice}"
        )
    size = -(-rows // n)
    if rows % n:
        values = {name: pad_rows(value, n) for name, value in values.items()}
    parts = [
        {
            name: own_rows(_rows_of(value, i * size, (i + 1) * size, f"{called}: {name}"))
            for name, value in values.items()
        }
        for i in range(n)
    ]
    return Split(parts, size, tuple(min(max(rows - i * size, 0), size) for i in range(n)))


def _rows_of(value: Any, start: int, end: int, where: str) -> Any:
    """Some rows of a value, as many as were asked for."""
    rows = cut_rows(value, start, end)
    found = count_rows(rows, where)
    if found != end - start:
        raise ValueError(
            f"{where}: rows {start} to {end} of this {type(value).__name__} are {found}: it is not cut by "
            "positions; pass an array or a list of its values"
        )
    return rows


def _common_rows(values: Mapping[str, Any], called: str) -> int:
    for name, value in values.items():
        _refuse_shards(f"{called}: {name}", value)
    counts = {name: count_rows(value, f"{called}: {name}") for name, value in values.items()}
    if len(set(counts.values())) > 1:
        each = ", ".join(f"{name} has {rows}" for name, rows in counts.items())
        raise ValueError(f"{called}: arguments that are split have different numbers of rows: {each}")
    rows = next(iter(counts.values()))
    if not rows:
        raise ValueError(f"{called}: {', '.join(values)} has no rows")
    return rows


def _is_dealt(value: Any) -> bool:
    return is_shardable(value) and not is_batch(value) and not is_array(value)


def _refuse_shards(name: str, value: Any) -> None:
    if isinstance(value, list) and value and all(map(is_batch, value)):
        raise TypeError(
            f"{name} is a list of shards, not of rows: pass the batch, or what split it as one value "
            "(such as a ShardedBatch), or use call_sharded()"
        )
    if isinstance(value, tuple | dict):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_shards(f"{name}[{key!r}]", part)


def _shards(name: str, value: Shardable, n: int) -> Sequence[Any]:
    shards = value.shard(n)
    if len(shards) != n:
        raise ValueError(f"{name} was split into {len(shards)} shards, and {n} are needed")
    return shards
