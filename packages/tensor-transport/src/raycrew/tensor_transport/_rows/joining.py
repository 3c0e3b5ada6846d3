"""The rows of several handles, one after another, as one view on the shards of all."""

from collections.abc import Sequence

from raycrew.tensor_transport._rows.shards import TensorShardInfo, check_alike
from raycrew.tensor_transport._rows.views import RowView
from raycrew.tensor_transport._rows.windows import Window


def join_rows(
    parts: Sequence[tuple[Sequence[TensorShardInfo], RowView, Window]],
) -> tuple[tuple[TensorShardInfo, ...], RowView, Window]:
    """Join views on shards, each with its columns, of which the result has all; a shard counts once.

    Raises:
        ValueError: Dtypes or row shapes differ, with their padding, or columns where some were cut.
    """
    numbers: dict[str, int] = {}
    shards: list[TensorShardInfo] = []
    views = []
    for its_shards, view, _ in parts:
        for shard in its_shards:
            if numbers.setdefault(shard.shard_id, len(shards)) == len(shards):
                shards.append(shard)
        views.append(view.renumbered([numbers[shard.shard_id] for shard in its_shards]))
    check_alike(shards)
    return tuple(shards), RowView.concat(views), Window.joined([window for _, _, window in parts])
