"""What runs in a worker's process: rollouts beside one another, each with its deadline."""

from raycrew.worker_groups.rollouts._in_worker.worker import (
    WATCH,
    RolloutWorker,
    check_columns,
    check_coroutine,
    current_rollout,
)

__all__ = ["WATCH", "RolloutWorker", "check_columns", "check_coroutine", "current_rollout"]
