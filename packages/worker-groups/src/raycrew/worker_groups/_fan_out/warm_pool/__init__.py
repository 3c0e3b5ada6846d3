"""The warm pool: one host per node, shared by all callers, with CPUs claimed only while it works."""

from raycrew.worker_groups._fan_out.warm_pool.asked import Ahead
from raycrew.worker_groups._fan_out.warm_pool.pool import Member, Pool, close_shared_pool, shared_pool

__all__ = ["Ahead", "Member", "Pool", "close_shared_pool", "shared_pool"]
