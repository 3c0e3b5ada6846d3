"""The rows of several handles, one after another, as one view on the shards of all."""

from collections.abc import Sequence

from raycrew.tensor_transport._rows.shards import TensorShardInfo, check_alike
from raycrew.tensor_transport._rows.views import RowView

Columns = tuple[int, int]


def join_rows(
    parts: Sequence[tuple[Sequence[TensorShardInfo], RowView, Columns]],
) -> tuple[tuple[TensorShardInfo, ...], RowView, Columns]:
    """Join views on shards, each with its columns, of which the result has all; a shard counts once.

    Raises:
        ValueError: Dtypes or row shapes differ, or columns where no padding was trimmed.
    """
    numbers: dict[str, int] = {}
    shards: list[TensorShardInfo] = []
    views = []
    for its_shards, view, _ in parts:
        for shard in its_shards:
            if numbers.setdefault(shard.shard_id, len(shards)) == len(shards):
                shards.append(shard)
        views.append(view.renumbered([numbers[shard.shard_id] for shard in its_shards]))
    columns = {columns for _, _, columns in parts}
    check_alike(shards)
    if len(columns) > 1 and any(shard.width is None for shard in shards):
        raise ValueError(f"handles of columns {sorted(columns)} do not join; nothing is padded silently")
    window = (min(start for start, _ in columns), max(end for _, end in columns))
    return tuple(shards), RowView.concat(views), window
