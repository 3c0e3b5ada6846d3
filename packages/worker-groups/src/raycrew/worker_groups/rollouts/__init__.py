"""Rollouts: the samples that they make, between those who make them and those who learn from them."""

from raycrew.worker_groups.rollouts.samples import SampleBatch, SampleQueue, SampleStats, VersionRun

__all__ = ["SampleBatch", "SampleQueue", "SampleStats", "VersionRun"]
