"""Every question to Ray: what it has and who holds it, calls on nodes, differences of versions."""

from raycrew.cluster_core._ray.census import check_connected, holders_by_node, take_census
from raycrew.cluster_core._ray.compat import (
    NODE_ID_LABEL,
    GroupState,
    await_group,
    check_cluster_answers,
    cluster_address,
    create_group,
    group_state,
    group_states,
    init,
    is_connected,
    live_node_ids,
    node_address,
    remove_group,
    withdraw_group,
)
from raycrew.cluster_core._ray.node_calls import run_on_nodes
from raycrew.cluster_core._ray.session import Session
from raycrew.cluster_core._ray.status import (
    autoscaler_is_running,
    draining_nodes,
    gone,
    leftover_groups,
    node_states,
    this_process,
)

__all__ = [
    "NODE_ID_LABEL",
    "GroupState",
    "Session",
    "autoscaler_is_running",
    "await_group",
    "check_cluster_answers",
    "check_connected",
    "cluster_address",
    "create_group",
    "draining_nodes",
    "gone",
    "group_state",
    "group_states",
    "holders_by_node",
    "init",
    "is_connected",
    "leftover_groups",
    "live_node_ids",
    "node_address",
    "node_states",
    "remove_group",
    "run_on_nodes",
    "take_census",
    "this_process",
    "withdraw_group",
]
