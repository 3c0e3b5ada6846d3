"""How a person at a terminal finds a cluster of their own, and presents its token."""

import os
import sys
from collections.abc import Callable, Iterable, MutableMapping

from raycrew.cluster_core._connection.discovery import (
    RunningCluster,
    choose,
    devices_tag,
    only_one,
    recorded_address,
    running_clusters,
)
from raycrew.cluster_core._connection.token import authentication


def prepare_visit(
    address: str,
    environ: MutableMapping[str, str] = os.environ,
    running: Callable[[], Iterable[RunningCluster]] = running_clusters,
) -> str:
    """Say which cluster `address` means, and set the variables by which Ray presents its token.

    Unlike a driver, a person looks at any cluster of theirs on this machine, whoever started it and whatever
    devices it is for. To be called before Ray is imported, which reads the variables then.

    Args:
        address: `host:port`, "auto", or another one that `init_ray` takes.
        environ: The environment; a token that is named there stays.
        running: Tells the clusters of this user on this machine.

    Raises:
        NoClusterError: "auto" means several clusters.
    """
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return address
    named = environ.get("RAY_ADDRESS") if address == "auto" else address
    clusters = list(running())
    if named in (None, "", "auto"):
        job, recorded = environ.get("SLURM_JOB_ID"), recorded_address(environ)
        found = choose(clusters, devices_tag(environ), recorded, job) or only_one(clusters)
    else:
        found = next((cluster for cluster in clusters if cluster.address == named), None)
    if found is None:
        return address
    if not authentication(environ):
        environ.update(found.authentication)
    return found.address
