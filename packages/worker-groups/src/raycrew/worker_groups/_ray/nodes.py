"""Nodes: which live, what runs on one of them, and their CPUs."""

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycrew.worker_groups._ray.gate import ANSWER_S, ask
from raycrew.worker_groups._ray.sessions import current_session, is_behind_proxy

logger = logging.getLogger(__name__)

_UNGRANTED = ("NO_RESOURCES", "INFEASIBLE")


def run_on_node(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    node_id: str | None,
    runtime_env: Mapping[str, Any] | None = None,
    own_process: bool = True,
) -> Any:
    """Start `fn(*args)` as a task without resources; gives its ObjectRef.

    Args:
        fn: The function.
        args: Its arguments.
        node_id: Where to run it.
        runtime_env: Its runtime environment.
        own_process: Whether its process ends after it; else one that is idle does, and stays.

    Raises:
        GetTimeoutError: Ray's control service, which the function goes to first, does not answer; a task that
            is started later is cancelled.
    """
    options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0}
    if own_process:
        options["max_calls"] = 1
    if node_id is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
    if runtime_env:
        options["runtime_env"] = dict(runtime_env)
    return ask(
        lambda: ray.remote(**options)(fn).remote(*args), undo=lambda started: ray.cancel(started, force=True)
    )


def living_nodes(timeout_s: float = ANSWER_S) -> list[Mapping[str, Any]]:
    """The entries of `ray.nodes()` for the nodes that Ray counts as alive.

    Raises:
        GetTimeoutError: Ray's control service does not answer.
    """
    nodes: Any = ray.nodes  # Without annotations in Ray.
    return [node for node in ask(nodes, timeout_s=timeout_s) if node["Alive"]]


def is_alive_node(node_id: str, timeout_s: float = ANSWER_S) -> bool:
    """Whether Ray counts a node as alive.

    Raises:
        GetTimeoutError: Ray's control service does not answer.
    """
    return any(node["NodeID"] == node_id for node in living_nodes(timeout_s))


def claim_cpus(cpus: Sequence[float]) -> PlacementGroup:
    """Ask Ray for CPUs, so many at a place, spread over nodes; does not wait until they are granted.

    Raises:
        GetTimeoutError: Ray's control service does not answer; what it claims later is given back.
    """
    bundles = [{"CPU": number} for number in cpus]
    claim: PlacementGroup = ask(
        lambda: placement_group(bundles, strategy="SPREAD"), undo=remove_placement_group
    )
    return claim


def give_back(claim: PlacementGroup) -> None:
    """Give CPUs back that were claimed."""
    try:
        ask(lambda: remove_placement_group(claim))
    except GetTimeoutError as error:
        logger.warning("claimed CPUs are given back once Ray can: %s", error)


def is_granted(group: PlacementGroup) -> bool | None:
    """Whether a placement group has its resources; None while Ray is making up its mind."""
    entry = ask(lambda: placement_group_table(group))
    if entry.get("state") == "CREATED":
        return True
    return False if entry.get("stats", {}).get("scheduling_state") in _UNGRANTED else None


def node_cpus() -> dict[str, tuple[float, float]]:
    """Free and total CPUs of every living node, by node id, as Ray knows them at this moment."""
    if is_behind_proxy():
        asked = run_on_node(_free_resources, [], node_id=None, own_process=False)
        free = current_session().get(asked, timeout=60)
    else:
        free = ask(_free_resources)
    totals = {node["NodeID"]: node["Resources"].get("CPU", 0.0) for node in living_nodes()}
    # Where Ray says nothing of a node, it has only just started.
    return {node: (free.get(node, {"CPU": total}).get("CPU", 0.0), total) for node, total in totals.items()}


def _free_resources() -> dict[str, dict[str, float]]:
    # Not from `ray.autoscaler`, whose status is true only up to a second after a change.
    state: Any = importlib.import_module("ray._private.state")
    free: dict[str, dict[str, float]] = state.available_resources_per_node()
    return free
