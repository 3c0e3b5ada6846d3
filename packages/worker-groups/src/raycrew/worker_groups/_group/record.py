"""What a started group tells everybody on the cluster of itself."""

import os
import platform
from collections.abc import Mapping
from typing import Any

from raycrew.cluster_core import Claim
from raycrew.worker_groups._health import GroupRecord, WorkerRecord, watch_owner
from raycrew.worker_groups._ray import own_namespace
from raycrew.worker_groups._start import GroupSpec, Started


def record_of_group(
    spec: GroupSpec, started: Started, claim: Claim, tied_groups: Mapping[int, int]
) -> GroupRecord:
    """What a started group tells everybody of itself.

    Args:
        spec: What it is to be.
        started: Who its workers are.
        claim: Where they are.
        tied_groups: The tied group of each rank, where ranks are tied.
    """
    facts = zip(started.order, started.names, started.ranks, started.facts, strict=True)
    workers = [
        WorkerRecord(
            rank=info.rank,
            actor=name,
            node_id=info.node_id,
            node_address=info.node_address,
            pid=own.pid,
            started=own.started,
            bundle_index=info.bundle_index,
            device=own.device_kind if info.device_index is None else f"{own.device_kind}:{info.device_index}",
            tied_group=tied_groups.get(info.rank),
            **_place(claim.actor_options(position)),
        )
        for position, name, info, own in facts
    ]
    generation = started.ranks[0].generation
    return GroupRecord(
        spec.name,
        spec.builder.fqn,
        own_namespace(),
        watch_owner(),
        generation,
        tuple(workers),
        driver=f"{platform.node()}:{os.getpid()}",
    )


def _place(options: Mapping[str, Any]) -> dict[str, Any]:
    """Which bundle of which of Ray's placement groups a worker is on."""
    strategy = options.get("scheduling_strategy")
    group = getattr(strategy, "placement_group", None)
    if group is None:
        return {}
    return {
        "placement_group": group.id.hex(),
        "placement_bundle": getattr(strategy, "placement_group_bundle_index", -1),
    }
