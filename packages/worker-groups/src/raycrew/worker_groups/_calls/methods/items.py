"""The items of arguments that are given for several ranks; pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from raycrew.worker_groups._calls.answers import refuse_as_items
from raycrew.worker_groups._worker import is_shardable


def split_per_rank(values: Mapping[str, Any], n: int) -> dict[str, Sequence[Any]]:
    """An item of each argument for each of `n` ranks.

    Raises:
        TypeError: An argument can't be split.
        ValueError: One has another number of items.
    """
    columns = {name: split(value, n, "ranks", f"argument {name!r}") for name, value in values.items()}
    if columns:
        exact_length(list(columns.values()), n, "ranks")
    return columns


def disjoint(kwargs: Mapping[str, Any], common: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Keyword arguments that are the same for all; none of them is given per rank, too.

    Raises:
        ValueError: One is.
    """
    if both := set(kwargs) & set(common or {}):
        raise ValueError(f"{sorted(both)} are given both per rank and in common_kwargs")
    return common or {}


def split(value: Any, n: int, what: str, who: str) -> Sequence[Any]:
    """The items of an argument, for `n` ranks or whatever `what` says.

    Raises:
        TypeError: It has none, or is a future whose results are joined.
    """
    refuse_as_items(value, who)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return value
    if is_shardable(value):
        return value.shard(n)
    raise TypeError(
        f"{who} holds one item for each of {n} {what}: a sequence or shardable, not {type(value).__name__}"
    )


def exact_length(
    columns: Sequence[Sequence[Any]], n: int, what: str, allow_partial: bool | None = None
) -> int:
    """The number of items of all columns; `allow_partial` is None where a caller has no such option.

    Raises:
        ValueError: Columns have different numbers, or not one for each of `n`.
    """
    lengths = {len(column) for column in columns}
    if len(lengths) > 1:
        raise ValueError(f"arguments have different numbers of items: {sorted(lengths)}")
    length = lengths.pop()
    if length != n and not (allow_partial and 0 < length < n):
        hint = "; allow_partial=True calls only as many" if allow_partial is False and 0 < length < n else ""
        raise ValueError(f"{length} items for {n} {what} to call{hint}")
    return length


def nested(
    value: Any, axes: Sequence[str], sizes: Sequence[int], who: str, allow_partial: bool
) -> dict[tuple[int, ...], Any]:
    """Items by their coordinates on the sharded axes.

    Raises:
        TypeError: What should hold items holds none.
        ValueError: An axis has another size.
    """
    if not axes:
        return {(): value}
    where = f"{who} on axis {axes[0]!r}"
    column = split(value, sizes[0], f"coordinates of axis {axes[0]!r}", who)
    n = len(column)
    if n != sizes[0] and not (allow_partial and 0 < n < sizes[0]):
        raise ValueError(f"{where} has {n} items, the axis has size {sizes[0]}")
    found = {}
    for i, item in enumerate(column):
        for at, leaf in nested(item, axes[1:], sizes[1:], f"{who}[{i}]", allow_partial).items():
            found[i, *at] = leaf
    return found
