"""Which bundles replicas get; pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from raycrew.cluster_core import Bundle


def places_for(
    bundles: Sequence[Bundle], holders: Mapping[int, Sequence[Any]], slots: int, replicas: int
) -> list[list[int]]:
    """Bundles for replicas, one each: free ones where there are enough, on as many nodes as possible.

    Args:
        bundles: Those of the cluster.
        holders: Who holds slots of them, by index.
        slots: How many slots each has.
        replicas: How many are wanted.

    Raises:
        ValueError: The cluster has fewer bundles.
    """
    if replicas > len(bundles):
        raise ValueError(f"{replicas} replicas need a bundle each, and the cluster has {len(bundles)}")
    free = [bundle for bundle in bundles if len(holders.get(bundle.index, ())) < slots]
    offered = free if len(free) >= replicas else bundles  # whoever claims them is told who holds them
    before: Counter[str] = Counter()  # bundles on each node
    order = []
    for bundle in offered:
        order.append((before[bundle.node_id], bundle.index))
        before[bundle.node_id] += 1
    return [[index] for _, index in sorted(order)[:replicas]]
