"""Every call of Ray, over this process's connection only and bounded; what ranks on it answer to calls."""

from raycrew.tensor_transport._ray import parents as parents
from raycrew.tensor_transport._ray.addresses import address_for_others
from raycrew.tensor_transport._ray.answers import answered
from raycrew.tensor_transport._ray.compat import moves_by_nixl
from raycrew.tensor_transport._ray.forks import CachedProperty, PerProcess
from raycrew.tensor_transport._ray.nodes import (
    alive_node_ids,
    call_actor,
    call_on_node,
    cluster_address_if_connected,
    connection_id,
    current_node_id,
    end_actors,
    find_actor,
    is_connected,
    machine_addresses,
    node_address,
    node_id_if_connected,
    send,
    start_actor,
    start_on_node,
    where,
)
from raycrew.tensor_transport._ray.objects import (
    RayByteStore,
    counts_references,
    get,
    get_by_nixl,
    not_here,
    put,
    put_by_nixl,
    references_held,
    register_nixl_pool,
    when_unreferenced,
)
from raycrew.tensor_transport._ray.plain import dumps_plain
from raycrew.tensor_transport._ray.session import Session, current_session

__all__ = [
    "CachedProperty",
    "PerProcess",
    "RayByteStore",
    "Session",
    "address_for_others",
    "alive_node_ids",
    "answered",
    "call_actor",
    "call_on_node",
    "cluster_address_if_connected",
    "connection_id",
    "counts_references",
    "current_node_id",
    "current_session",
    "dumps_plain",
    "end_actors",
    "find_actor",
    "get",
    "get_by_nixl",
    "is_connected",
    "machine_addresses",
    "moves_by_nixl",
    "node_address",
    "node_id_if_connected",
    "not_here",
    "put",
    "put_by_nixl",
    "references_held",
    "register_nixl_pool",
    "send",
    "start_actor",
    "start_on_node",
    "when_unreferenced",
    "where",
]
