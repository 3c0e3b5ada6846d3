"""What a group tells everybody on the cluster of itself, whether it stands or is only starting."""

import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from raycrew.cluster_core import Claim
from raycrew.worker_groups._health import GroupRecord, StartRecord, WorkerRecord, watch_owner
from raycrew.worker_groups._ray import own_namespace
from raycrew.worker_groups._start.spec import GroupSpec
from raycrew.worker_groups.sharding import RankInfo, WorkerFacts


def record_of(
    spec: GroupSpec, generation: int, workers: Sequence[WorkerRecord], start: StartRecord | None = None
) -> GroupRecord:
    """What a group tells of itself.

    Args:
        spec: What it is to be.
        generation: Grows with every restart.
        workers: In rank order, as far as they are known.
        start: How far its start has got; None once it stands.
    """
    return GroupRecord(
        spec.name,
        spec.builder.fqn,
        own_namespace(),
        watch_owner(),
        generation,
        tuple(workers),
        driver=f"{platform.node()}:{os.getpid()}",
        start=start,
    )


def workers_of(
    claim: Claim,
    order: Sequence[int],
    names: Sequence[str],
    ranks: Sequence[RankInfo],
    facts: Sequence[WorkerFacts],
    tied_groups: Mapping[int, int],
) -> list[WorkerRecord]:
    """Who the workers are, and where.

    Args:
        claim: Where they are.
        order: The position of each rank.
        names: Names of their actors, in rank order.
        ranks: In rank order.
        facts: What is known of their processes, in rank order.
        tied_groups: The tied group of each rank, where ranks are tied.
    """
    return [
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
            **place_of(claim.actor_options(position)),
        )
        for position, name, info, own in zip(order, names, ranks, facts, strict=True)
    ]


def place_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Which bundle of which of Ray's placement groups a worker is on."""
    strategy = options.get("scheduling_strategy")
    group = getattr(strategy, "placement_group", None)
    if group is None:
        return {}
    return {
        "placement_group": group.id.hex(),
        "placement_bundle": getattr(strategy, "placement_group_bundle_index", -1),
    }
