"""Every question to Ray: what it has and who holds it, calls on nodes, differences of versions."""

from raycrew.cluster_core._ray.census import holders_by_node, take_census
from raycrew.cluster_core._ray.compat import (
    NODE_ID_LABEL,
    GroupState,
    await_group,
    check_cluster_answers,
    cluster_address,
    create_group,
    end_actor,
    gone_groups,
    group_state,
    group_states,
    init,
    live_node_ids,
    node_address,
    remove_group,
    start_actor,
    withdraw_group,
    withdraw_groups,
)
from raycrew.cluster_core._ray.gate import answer_s, ask, check_connected
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
    "answer_s",
    "ask",
    "autoscaler_is_running",
    "await_group",
    "check_cluster_answers",
    "check_connected",
    "cluster_address",
    "create_group",
    "draining_nodes",
    "end_actor",
    "gone",
    "gone_groups",
    "group_state",
    "group_states",
    "holders_by_node",
    "init",
    "leftover_groups",
    "live_node_ids",
    "node_address",
    "node_states",
    "remove_group",
    "run_on_nodes",
    "start_actor",
    "take_census",
    "this_process",
    "withdraw_group",
    "withdraw_groups",
]
