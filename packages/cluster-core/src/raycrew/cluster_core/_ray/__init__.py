"""Every question to Ray: what it has and who holds it, calls on nodes, differences of versions."""

from typing import TYPE_CHECKING

from raycrew.cluster_core._ray import parents as parents
from raycrew.cluster_core._ray.later import lazy

if TYPE_CHECKING:
    from raycrew.cluster_core._ray.census import holders_by_node, node_states
    from raycrew.cluster_core._ray.compat import cluster_address, init, node_address
    from raycrew.cluster_core._ray.forks import PerProcess
    from raycrew.cluster_core._ray.gate import answer_s, ask, check_connected, check_not_forked
    from raycrew.cluster_core._ray.node_calls import run_on_nodes
    from raycrew.cluster_core._ray.questions import (
        NODE_ID_LABEL,
        GroupState,
        await_group,
        cancel_tasks,
        check_cluster_answers,
        create_group,
        draining_node_ids,
        end_actor,
        gone_groups,
        group_state,
        group_states,
        live_node_ids,
        remove_group,
        start_actor,
        start_tasks,
        withdraw_group,
        withdraw_groups,
    )
    from raycrew.cluster_core._ray.session import Session
    from raycrew.cluster_core._ray.status import (
        autoscaler_is_running,
        gone,
        leftover_groups,
        node_id,
        this_process,
    )

__all__ = [
    "NODE_ID_LABEL",
    "GroupState",
    "PerProcess",
    "Session",
    "answer_s",
    "ask",
    "autoscaler_is_running",
    "await_group",
    "cancel_tasks",
    "check_cluster_answers",
    "check_connected",
    "check_not_forked",
    "cluster_address",
    "create_group",
    "draining_node_ids",
    "end_actor",
    "gone",
    "gone_groups",
    "group_state",
    "group_states",
    "holders_by_node",
    "init",
    "lazy",
    "leftover_groups",
    "live_node_ids",
    "node_address",
    "node_id",
    "node_states",
    "remove_group",
    "run_on_nodes",
    "start_actor",
    "start_tasks",
    "this_process",
    "withdraw_group",
    "withdraw_groups",
]

# Doors that open without Ray come for `lazy`: the rest is imported when it is first used.
__getattr__ = lazy(
    __name__,
    {
        "census": ["holders_by_node", "node_states"],
        "compat": ["cluster_address", "init", "node_address"],
        "forks": ["PerProcess"],
        "gate": ["answer_s", "ask", "check_connected", "check_not_forked"],
        "node_calls": ["run_on_nodes"],
        "questions": [
            "NODE_ID_LABEL",
            "GroupState",
            "await_group",
            "cancel_tasks",
            "check_cluster_answers",
            "create_group",
            "draining_node_ids",
            "end_actor",
            "gone_groups",
            "group_state",
            "group_states",
            "live_node_ids",
            "remove_group",
            "start_actor",
            "start_tasks",
            "withdraw_group",
            "withdraw_groups",
        ],
        "session": ["Session"],
        "status": [
            "autoscaler_is_running",
            "gone",
            "leftover_groups",
            "node_id",
            "this_process",
        ],
    },
)
