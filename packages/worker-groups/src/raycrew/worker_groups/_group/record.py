"""What a started group tells everybody on the cluster of itself."""

from collections.abc import Mapping

from raycrew.cluster_core import Claim
from raycrew.worker_groups._health import GroupRecord
from raycrew.worker_groups._start import GroupSpec, Started, record_of, workers_of


def record_of_group(
    spec: GroupSpec, claim: Claim, started: Started, tied_groups: Mapping[int, int]
) -> GroupRecord:
    """What a started group tells everybody of itself.

    Args:
        spec: What it is to be.
        claim: Where its workers are.
        started: Who they are.
        tied_groups: The tied group of each rank, where ranks are tied.
    """
    known = (started.order, started.names, started.ranks, started.facts)
    return record_of(spec, started.ranks[0].generation, workers_of(claim, *known, tied_groups))
