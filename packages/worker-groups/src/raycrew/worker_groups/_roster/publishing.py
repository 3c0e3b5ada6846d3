"""A group's record, kept where everybody on the cluster can read it until the group ends."""

import logging
import threading
import uuid
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayError

from raycrew.cluster_core import Claim, ClusterError
from raycrew.worker_groups._health import watch_owner
from raycrew.worker_groups._ray import drop_record, own_namespace, put_record
from raycrew.worker_groups._roster.records import GroupRecord, WorkerRecord
from raycrew.worker_groups._start import GroupSpec, Started
from raycrew.worker_groups.errors import WorkerGroupError

logger = logging.getLogger(__name__)

#: How keys of groups begin.
GROUPS = "group/"

_ANSWER_S = 2.0  # a group goes on, and ends, without its record
_FAILURES = (RayError, WorkerGroupError, ClusterError, OSError)


class Publication:
    """Of one group; that a record can't be left or taken away is logged, and fails nothing."""

    def __init__(self) -> None:
        self._key = f"{GROUPS}{uuid.uuid4().hex}"
        self._is_over = False
        self._lock = threading.Lock()

    def publish(self, record: GroupRecord) -> None:
        """From now on this is the record, unless the group has ended meanwhile."""
        with self._lock:
            try:
                put_record(self._key, record.as_text(), _ANSWER_S)
                if self._is_over:
                    drop_record(self._key, _ANSWER_S)
            except _FAILURES as error:
                logger.info("%s: others can't be told of its ranks: %s", record.name, error)

    def end(self) -> None:
        """Take the record away, for good; waits for no lock, as a signal handler may come in between."""
        self._is_over = True
        try:
            drop_record(self._key, _ANSWER_S)
        except _FAILURES as error:
            logger.debug("the record %s stays: %s", self._key, error)


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
        spec.name, spec.builder.fqn, own_namespace(), watch_owner(), generation, tuple(workers)
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
