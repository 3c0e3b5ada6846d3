"""Load balancing: calls and streams of items over the workers of a group, one worker each."""

from raycrew.worker_groups.balancing._balanced import Balanced
from raycrew.worker_groups.balancing._balancer import LoadBalancer
from raycrew.worker_groups.balancing._strategies import (
    ConsistentHash,
    LeastLoaded,
    LeastOutstanding,
    RoundRobin,
    Strategy,
    WorkerLoad,
    strategy_of,
)
from raycrew.worker_groups.balancing._stream import LATER, Item, LostWorkerError, Stream
from raycrew.worker_groups.balancing._usage import ProcessUsage
from raycrew.worker_groups.balancing._workload import BalancedGroup, Sent, StreamedCalls, ended_of

__all__ = [
    "LATER",
    "Balanced",
    "BalancedGroup",
    "ConsistentHash",
    "Item",
    "LeastLoaded",
    "LeastOutstanding",
    "LoadBalancer",
    "LostWorkerError",
    "ProcessUsage",
    "RoundRobin",
    "Sent",
    "Strategy",
    "Stream",
    "StreamedCalls",
    "WorkerLoad",
    "ended_of",
    "strategy_of",
]
