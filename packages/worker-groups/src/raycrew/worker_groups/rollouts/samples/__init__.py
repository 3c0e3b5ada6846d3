"""Queues of samples between producers and consumers that know how old a sample may be."""

from raycrew.worker_groups.rollouts.samples._batch import SampleBatch
from raycrew.worker_groups.rollouts.samples._keeping import SampleStats
from raycrew.worker_groups.rollouts.samples._queue import SampleQueue
from raycrew.worker_groups.rollouts.samples._states import VersionRun

__all__ = ["SampleBatch", "SampleQueue", "SampleStats", "VersionRun"]
