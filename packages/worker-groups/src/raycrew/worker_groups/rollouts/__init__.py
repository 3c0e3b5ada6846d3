"""Rollouts: a coroutine per prompt on the workers of a pool, and the samples that they make, of known age."""

from raycrew.worker_groups.rollouts._collection import RolloutCollection
from raycrew.worker_groups.rollouts._in_worker import current_rollout
from raycrew.worker_groups.rollouts._pool import RolloutPool
from raycrew.worker_groups.rollouts._telling import RolloutStats
from raycrew.worker_groups.rollouts._values import (
    CurrentRollout,
    RolloutFailure,
    RolloutGroup,
    RolloutSample,
)
from raycrew.worker_groups.rollouts.errors import (
    PromptError,
    RolloutError,
    RolloutFailedError,
    RolloutFileError,
)
from raycrew.worker_groups.rollouts.samples import SampleBatch, SampleQueue, SampleStats, VersionRun

__all__ = [
    "CurrentRollout",
    "PromptError",
    "RolloutCollection",
    "RolloutError",
    "RolloutFailedError",
    "RolloutFailure",
    "RolloutFileError",
    "RolloutGroup",
    "RolloutPool",
    "RolloutSample",
    "RolloutStats",
    "SampleBatch",
    "SampleQueue",
    "SampleStats",
    "VersionRun",
    "current_rollout",
]
