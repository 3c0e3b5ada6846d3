"""How a person at a terminal finds a cluster of their own, and presents its token."""

import os
import sys
from collections.abc import Callable, Iterable, MutableMapping, Sequence

from raycrew.cluster_core._connection.addresses import is_same
from raycrew.cluster_core._connection.discovery import (
    RunningCluster,
    choose,
    devices_tag,
    only_one,
    recorded_address,
    running_clusters,
)
from raycrew.cluster_core._connection.token import authentication
from raycrew.cluster_core.errors import ClusterAuthenticationError, ClusterUnreachableError, NoClusterError


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
        chosen = choose(clusters, devices_tag(environ), recorded, job)
        found = chosen[0] if chosen else only_one(clusters)
    else:
        found = _meant(named, clusters)
    if found is None:
        return address
    _present(found, environ)
    return found.address


def _meant(address: str, clusters: Sequence[RunningCluster]) -> RunningCluster | None:
    """The cluster that an address means: sooner by its own spelling than by another one."""
    by_spelling = (cluster for cluster in clusters if cluster.address == address)
    return next(by_spelling, None) or next((one for one in clusters if is_same(address, one.address)), None)


def present_token(
    address: str,
    environ: MutableMapping[str, str] = os.environ,
    running: Callable[[], Iterable[RunningCluster]] = running_clusters,
) -> str:
    """Set the variables by which Ray presents the token of a cluster, where it is one of this user's here.

    To be called before Ray is imported. A token that the environment names stays.

    Returns:
        The cluster's own address, to be joined at: where an address that is spelled otherwise leads to may
        change, and the token is for no other cluster.
    """
    found = _meant(address, list(running()))
    if found is None:
        return address
    _present(found, environ)
    return found.address


def _present(found: RunningCluster, environ: MutableMapping[str, str]) -> None:
    if not authentication(environ):
        environ.update(found.authentication)


def connection_advice(error: Exception) -> str:
    """What a person can do whose command found no cluster, or was refused by it; empty for other errors."""
    if isinstance(error, ClusterAuthenticationError):
        return (
            "It runs with tokens: call this as the user who started it, or name the token's file in "
            "RAY_AUTH_TOKEN_PATH, with RAY_AUTH_MODE=token."
        )
    if isinstance(error, NoClusterError) and error.running:
        return f"Say which: --address {error.running[-1]}, for the one that was started last."
    if isinstance(error, NoClusterError):
        return "Name one with --address, or start one with init_ray() or `ray start --head`."
    if isinstance(error, ClusterUnreachableError):
        return (
            "Compare the address with what init_ray() or `ray start` said; without --address yours is found."
        )
    return ""
