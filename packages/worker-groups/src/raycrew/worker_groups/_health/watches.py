"""The watches of this driver's session: one on each node that it has workers on."""

import functools
import inspect
import os
import threading
import uuid
from collections.abc import Sequence
from typing import Any

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycrew.worker_groups._on_nodes import (
    examining,
    family,
    keeper,
    leavings,
    limits,
    lookout,
    marks,
    page,
    process_table,
    ring,
    sight,
    stacks,
    watch,
)
from raycrew.worker_groups._ray import PerProcess, connection, end_actors, start_actor

_KEEPERS = (process_table, marks, family, limits, lookout, keeper)  # each needs only those before it

#: How the names of watches begin; whose they are, their nodes and something unique follow, with dashes.
WATCH = "raycrew-watch-"

#: What a watch is told of a worker.
Told = watch.Told

_lock = PerProcess(threading.Lock)
_owner_lock = PerProcess(threading.RLock)  # a cache alone lets two threads make two
_watches: dict[tuple[str | None, str], Any] = {}


def watch_owner() -> str:
    """What is in the names of all watches of this process over this connection, and of no others."""
    with _owner_lock.here:
        return _owner_of(os.getpid(), connection())


@functools.cache
def _owner_of(_pid: int, _connection: str | None) -> str:
    """A process that was forked has a name of its own; one that connects anew has another."""
    return uuid.uuid4().hex[:12]


def stand_by(node_ids: Sequence[str]) -> None:
    """Have watches made on these nodes, without waiting for them."""
    for node_id in dict.fromkeys(node_ids):
        watch_on(node_id)


def watch_on(node_id: str, timeout_s: float = 10.0) -> Any:
    """The watch of a node, made where there is none."""
    session = connection()
    with _lock.here:
        for other in [key for key in _watches if key[0] != session]:
            del _watches[other]
        known = _watches.get((session, node_id))
    if known is not None:
        return known
    # Not softly: on another node it would read another process table.
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    name = f"{WATCH}{watch_owner()}-{node_id}-{uuid.uuid4().hex[:8]}"
    options = {"scheduling_strategy": here, "name": name}
    made = start_actor(_actor_class(), options, timeout_s, [_sources()])
    with _lock.here:  # Ray may take its time, for which nobody else should wait
        kept = _watches.setdefault((session, node_id), made)
    if kept is not made:
        end_actors([made])
    return kept


def has_watch(node_id: str) -> bool:
    """Whether there is one on a node already, for all that is known."""
    return (connection(), node_id) in _watches


def forget_watch(node_id: str, dead: Any) -> None:
    """Have another watch made on a node when one is wanted, in place of a dead one."""
    with _lock.here:
        if _watches.get((connection(), node_id)) is dead:
            del _watches[connection(), node_id]


@functools.cache
def _sources() -> dict[str, str]:
    """The texts of what a keeper runs, for nodes where this package is not installed."""
    return {module.__name__: inspect.getsource(module) for module in _KEEPERS}


@functools.cache
def _actor_class() -> Any:
    for module in (*_KEEPERS, ring, page, sight, stacks, leavings, examining, watch):
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return ray.remote(num_cpus=0, max_restarts=0)(watch.Watch)
