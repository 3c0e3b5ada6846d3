"""The options that a constructor's arguments make."""

import inspect

from raycrew.cluster_core import RayVirtualCluster
from raycrew.cluster_core._placement.options import ClusterOptions


def options_of(*args, **kwargs):
    bound = inspect.signature(RayVirtualCluster).bind(*args, **kwargs)
    bound.apply_defaults()
    return ClusterOptions.among(bound.arguments)
