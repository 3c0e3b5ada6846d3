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
from raycrew.worker_groups._ray.bulletin import (
    ActorName,
    drop_records,
    find_actors,
    named_actors,
    put_record,
    records,
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
from raycrew.worker_groups._ray.measures import counter, gauge, histogram
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
    "ActorName",
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
    "counter",
    "current_session",
    "drop_records",
    "end_actors",
    "find_actor",
    "find_actors",
    "gauge",
    "give_back",
    "histogram",
    "is_alive_node",
    "is_behind_proxy",
    "is_death",
    "is_granted",
    "is_stored",
    "may_come_back",
    "named_actors",
    "node_cpus",
    "own_call_id",
    "own_namespace",
    "own_node",
    "put_record",
    "records",
    "request_exit",
    "run_on_node",
    "runs_in_order",
    "start_actor",
    "unwrap_actor_class",
    "while_connected",
]
