"""Load balancing: calls and streams of items over the workers of a group, one worker each."""

from raycrew.worker_groups.balancing._balancer import BalancedGroup, LoadBalancer
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

__all__ = [
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
