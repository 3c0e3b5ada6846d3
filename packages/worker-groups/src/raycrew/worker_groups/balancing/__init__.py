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
from raycrew.worker_groups.balancing._usage import ProcessUsage
from raycrew.worker_groups.balancing._workload import BalancedGroup

__all__ = [
    "Balanced",
    "BalancedGroup",
    "ConsistentHash",
    "LeastLoaded",
    "LeastOutstanding",
    "LoadBalancer",
    "ProcessUsage",
    "RoundRobin",
    "Strategy",
    "WorkerLoad",
    "strategy_of",
]
