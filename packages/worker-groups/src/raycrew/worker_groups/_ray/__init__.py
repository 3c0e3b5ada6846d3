"""Every question to Ray: differences of versions, and one gate that bounds each in time."""

from raycrew.worker_groups._ray.actors import (
    ActorState,
    actor_states,
    await_end,
    end_actors,
    find_actor,
    request_exit,
    start_actor,
)
from raycrew.worker_groups._ray.compat import (
    assigned_accelerators,
    call_cancelled,
    call_id,
    is_stored,
    own_call_id,
    own_namespace,
    own_node,
    runs_in_order,
    unwrap_actor_class,
)
from raycrew.worker_groups._ray.nodes import (
    claim_cpus,
    give_back,
    is_alive_node,
    is_granted,
    node_cpus,
    run_on_node,
)
from raycrew.worker_groups._ray.raised import cause_of, is_death, may_come_back
from raycrew.worker_groups._ray.sessions import (
    check_session,
    connection,
    current_session,
    is_behind_proxy,
    while_connected,
)

__all__ = [
    "ActorState",
    "actor_states",
    "assigned_accelerators",
    "await_end",
    "call_cancelled",
    "call_id",
    "cause_of",
    "check_session",
    "claim_cpus",
    "connection",
    "current_session",
    "end_actors",
    "find_actor",
    "give_back",
    "is_alive_node",
    "is_behind_proxy",
    "is_death",
    "is_granted",
    "is_stored",
    "may_come_back",
    "node_cpus",
    "own_call_id",
    "own_namespace",
    "own_node",
    "request_exit",
    "run_on_node",
    "runs_in_order",
    "start_actor",
    "unwrap_actor_class",
    "while_connected",
]
