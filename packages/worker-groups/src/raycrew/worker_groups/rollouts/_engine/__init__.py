"""Has prompts rolled out: taken from a stream, called on workers, and tried again, in a thread of its own."""

from raycrew.worker_groups.rollouts._engine.calls import Ended, Limits, RolloutCalls
from raycrew.worker_groups.rollouts._engine.company import Company
from raycrew.worker_groups.rollouts._engine.engine import Bounds, Engine, OnError
from raycrew.worker_groups.rollouts._engine.prompts import Prompts, check_prompts
from raycrew.worker_groups.rollouts._engine.tasks import Retries

__all__ = [
    "Bounds",
    "Company",
    "Ended",
    "Engine",
    "Limits",
    "OnError",
    "Prompts",
    "Retries",
    "RolloutCalls",
    "check_prompts",
]
