"""Which cluster a driver means, and why that one."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from raycrew.cluster_core._connection.addresses import check_address
from raycrew.cluster_core._connection.discovery import (
    RunningCluster,
    choose,
    devices_tag,
    recorded_address,
    running_clusters,
)
from raycrew.cluster_core.errors import NoClusterError


@dataclass(frozen=True, slots=True)
class Target:
    """A cluster to join, or the wish for a fresh one.

    Attributes:
        address: Its address; None for a fresh cluster.
        why: What led to it, as the end of a sentence.
        is_found: Whether it was found on this machine, and nobody named it.
    """

    address: str | None
    why: str
    is_found: bool = False


def target_of(
    wanted: str | None,
    environ: Mapping[str, str],
    temp_dir: str | None = None,
    running: Callable[[], Iterable[RunningCluster]] = running_clusters,
) -> Target:
    """What is meant by an address, or by none.

    Args:
        wanted: `host:port`, `ray://host:port`, "auto", "local", or None.
        environ: The environment; its `RAY_ADDRESS` counts where no address is named.
        temp_dir: The folder for sessions, if it is not Ray's own choice.
        running: Tells the clusters of this user on this machine.

    Raises:
        TypeError: The address is neither a string nor a path.
        ValueError: It is malformed, or a path.
        NoClusterError: "auto" found no cluster.
    """
    named = environ.get("RAY_ADDRESS") if wanted in (None, "auto") else None
    address = named or wanted
    check_address(address)
    if address == "local":
        return Target(None, f"{'RAY_ADDRESS' if named else 'the address'} is 'local'")
    if address not in (None, "auto"):
        return Target(address, "RAY_ADDRESS names it" if named else "its address was given")
    chosen = choose(
        running(), devices_tag(environ), recorded_address(environ, temp_dir), environ.get("SLURM_JOB_ID")
    )
    if chosen is not None:
        return Target(chosen[0].address, chosen[1], is_found=True)
    if address == "auto":
        raise NoClusterError("no running Ray cluster was found on this machine; pass its address, or 'local'")
    return Target(None, "no address was given, and none to join was found on this machine")
