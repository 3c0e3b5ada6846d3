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

__all__ = [
    "BalancedGroup",
    "ConsistentHash",
    "LeastLoaded",
    "LeastOutstanding",
    "LoadBalancer",
    "RoundRobin",
    "Strategy",
    "WorkerLoad",
    "strategy_of",
]
