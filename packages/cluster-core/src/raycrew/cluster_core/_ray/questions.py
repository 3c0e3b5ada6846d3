"""What is asked of Ray's control service, or told it, through the gate; one function each."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.exceptions import AuthenticationError, GetTimeoutError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from raycrew.cluster_core._ray.compat import node_table
from raycrew.cluster_core._ray.gate import answer_s, ask, check_connected
from raycrew.cluster_core._ray.session import Session
from raycrew.cluster_core.errors import (
    ClusterAuthenticationError,
    ClusterClosedError,
    ClusterConnectionError,
    ClusterError,
    ClusterUnreachableError,
)

logger = logging.getLogger(__name__)

NODE_ID_LABEL = "ray.io/node-id"
_PLACING_S = 2.0
_NOT_PLACED = ("NO_RESOURCES", "INFEASIBLE", "REMOVED")


@dataclass(frozen=True, slots=True)
class GroupState:
    """What Ray says of a placement group.

    Attributes:
        name: The group's name.
        state: PENDING, PREPARED, CREATED, RESCHEDULING, REMOVED, or UNKNOWN when Ray does not know the group.
        scheduling_state: Why it is not created yet: INFEASIBLE, NO_RESOURCES, …
        bundles: Resources of each bundle, in bundle order.
        node_ids: Node of each bundle in bundle order; empty strings until they are placed.
        group_id: Ray's id of the group.
    """

    name: str
    state: str
    scheduling_state: str
    bundles: tuple[Mapping[str, float], ...]
    node_ids: tuple[str, ...]
    group_id: str = ""


def live_nodes() -> list[Mapping[str, Any]]:
    """The entries of `ray.nodes()` for the nodes that Ray holds for alive.

    Raises:
        GetTimeoutError: Ray's control service does not answer.
    """
    nodes: Any = ray.nodes  # Without annotations in Ray.
    return [node for node in ask(nodes) if node["Alive"]]


def live_node_ids() -> set[str]:
    """Ray ids of the nodes that Ray holds for alive."""
    return {node["NodeID"] for node in live_nodes()}


def free_resources() -> dict[str, dict[str, float]]:
    """What is free on each node, by Ray id, as Ray's scheduler of placement groups sees it at this moment.

    Raises:
        GetTimeoutError: Ray's control service does not answer.
    """
    free: dict[str, dict[str, float]] = ask(lambda: node_table().available_resources_per_node())
    return free


def draining_node_ids() -> set[str]:
    """Ray ids of the nodes that are going to leave, where Ray places nothing new.

    Raises:
        GetTimeoutError: Ray's control service does not answer.
    """
    return set(ask(lambda: node_table().get_draining_nodes()))


def create_group(
    bundles: Sequence[Mapping[str, float]],
    strategy: str,
    name: str,
    selectors: Sequence[Mapping[str, str]],
) -> PlacementGroup:
    """Ask for a placement group whose bundles go where their label selectors say; does not wait for them.

    A group that Ray makes only after it was given up is removed again.

    Raises:
        GetTimeoutError: Ray's control service does not answer.
    """
    wanted: Any = [dict(one) for one in selectors] if any(selectors) else None
    create: Any = placement_group
    parts = [dict(one) for one in bundles]
    group: PlacementGroup = ask(
        lambda: create(parts, strategy=strategy, name=name, bundle_label_selector=wanted), undo=withdraw_group
    )
    return group


def await_group(group: PlacementGroup, timeout_s: float) -> bool:
    """Wait until a placement group is created, up to a time; say whether it is. A removed one never is."""
    try:
        return ask(lambda: bool(group.wait(max(timeout_s, 0))), timeout_s=max(timeout_s, 0) + answer_s())
    except (RayError, ClusterError):
        raise
    except Exception as error:  # noqa: BLE001 - Ray has no class for a group that does not exist.
        logger.debug("placement group %s: %s", group.id.hex(), error)
        return False


def remove_group(group: PlacementGroup) -> None:
    """Ask Ray to remove a placement group; does not wait, and a removed group is no error."""
    ask(lambda: remove_placement_group(group))


def withdraw_groups(groups: Iterable[PlacementGroup]) -> None:
    """Remove several groups that Ray may be placing; what is given up is removed when Ray answers again."""

    def withdraw() -> None:
        for group in groups:
            try:
                withdraw_group(group)
            except RayError as error:
                logger.warning("placement group %s could not be removed: %s", group.id.hex(), error)

    try:
        ask(withdraw)
    except GetTimeoutError as error:
        logger.warning("placement groups are removed once Ray's control service goes on: %s", error)


def withdraw_group(group: PlacementGroup) -> None:
    """Remove a group that Ray may be placing at this moment; waits a little until it is not.

    What a group holds so far is lost for good if it is removed in between (Ray's issue 64693).
    """
    ask(lambda: _withdraw(group))


def _withdraw(group: PlacementGroup) -> None:
    end = time.monotonic() + _PLACING_S
    while time.monotonic() < end:
        state = group_state(group)
        if state.state in ("CREATED", "REMOVED", "UNKNOWN") or state.scheduling_state in _NOT_PLACED:
            break
        await_group(group, 0.05)
    remove_group(group)


def _group_state(entry: Mapping[str, Any]) -> GroupState:
    bundles, nodes = entry.get("bundles", {}), entry.get("bundles_to_node_id", {})
    return GroupState(
        entry.get("name", ""),
        entry.get("state", "UNKNOWN"),
        entry.get("stats", {}).get("scheduling_state", ""),
        tuple(bundles[i] for i in sorted(bundles)),
        tuple(nodes[i] for i in sorted(nodes)),
        entry.get("placement_group_id", ""),
    )


def group_state(group: PlacementGroup) -> GroupState:
    """What Ray says of one placement group."""
    return _group_state(ask(lambda: placement_group_table(group)) or {})


def group_states() -> list[GroupState]:
    """What Ray says of all placement groups; slow in big clusters, for explanations only."""
    return [_group_state(entry) for entry in ask(placement_group_table).values()]


def gone_groups(groups: Sequence[PlacementGroup]) -> list[int]:
    """Positions of those placement groups that were removed."""
    states = ask(lambda: [group_state(group).state for group in groups])
    return [position for position, state in enumerate(states) if state in ("REMOVED", "UNKNOWN")]


def start_actor(options: Mapping[str, Any], cls: type, *arguments: Any) -> Any:
    """Start an actor without waiting for it; one that Ray makes only after it was given up is ended."""
    make: Any = ray.remote(cls)
    return ask(lambda: make.options(**options).remote(*arguments), undo=ray.kill)


def start_tasks(fn: Callable[[], Any], options: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Start `fn` as a task, once for each set of options; gives the ObjectRefs.

    Raises:
        GetTimeoutError: Ray's control service, which the function goes to first, does not answer; tasks that
            are started later are cancelled.
    """
    make: Any = ray.remote(num_cpus=0, max_retries=0)
    task = make(fn)
    session = check_connected()
    started: list[Any] = ask(
        lambda: [task.options(**one).remote() for one in options],
        undo=lambda refs: cancel_tasks(refs, session),
    )
    return started


def cancel_tasks(refs: Iterable[Any], session: Session) -> None:
    """Cancel tasks of a session, those that run too; they ended with it, if it has."""
    with suppress(ClusterClosedError), session.while_connected():
        for ref in refs:
            ray.cancel(ref, force=True)


def end_actor(actor: Any) -> None:
    """End an actor at once; does not wait until it has ended."""
    ask(lambda: ray.kill(actor))


def check_cluster_answers(address: str, timeout_s: float) -> None:
    """Ask a cluster for its status; `ray.init` tries for 20 s with a wrong token, for minutes with no answer.

    Raises:
        ClusterUnreachableError: No answer in time.
        ClusterAuthenticationError: The cluster refuses the token.
    """
    try:
        ask(
            lambda: get_cluster_status(address, timeout=max(1, int(timeout_s))),
            timeout_s=timeout_s,
            connected=False,
        )
    except Exception as error:
        raise _refusal(address, error) from error


def _refusal(address: str, error: Exception) -> ClusterConnectionError:
    if isinstance(error, AuthenticationError):
        return ClusterAuthenticationError(
            f"the cluster at {address} refuses this process's token. Before Python starts, "
            "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN to its own",
            address,
        )
    return ClusterUnreachableError(f"what listens at {address} does not answer as Ray does: {error}", address)
