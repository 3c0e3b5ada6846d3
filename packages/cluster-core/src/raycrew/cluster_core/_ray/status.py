"""What Ray's control service knows of nodes, actors, drivers and autoscalers; works without the dashboard."""

import asyncio
import functools
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.autoscaler.v2 import sdk
from ray.core.generated import autoscaler_pb2, gcs_pb2
from ray.exceptions import RayError

from raycrew.cluster_core._planning import NodeState, Process
from raycrew.cluster_core._ray import compat, questions
from raycrew.cluster_core._ray.compat import is_client
from raycrew.cluster_core._ray.gate import ask, check_connected

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ANSWER_S = 10
_TASK_S = 60.0
_FIRST_REPORT_S = 60.0  # Younger clusters may have an autoscaler that has not reported yet.
_AUTOSCALER_REPORT = b"__autoscaling_status"

_known_nodes: dict[str, Mapping[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class ActorState:
    """An actor that runs.

    Attributes:
        name: Its name, or an empty string.
        class_name: The class that it is made of.
        node_id: Where it runs.
        resources: What it holds there by itself; empty within a placement group, which holds it.
    """

    name: str
    class_name: str
    node_id: str
    resources: Mapping[str, float]


def _in_cluster(fn: Callable[..., T], *args: Any) -> T:
    """Call a function where the GCS can be reached: here, or in a task behind a `ray://` proxy."""
    if not is_client():
        return ask(lambda: fn(*args))
    result: T = ask(lambda: ray.get(ray.remote(num_cpus=0)(fn).remote(*args)), timeout_s=_TASK_S)
    return result


def _status() -> Any:
    """Nodes and autoscalers as Ray's autoscalers see them: a `GetClusterStatusReply`."""
    address = compat.cluster_address()
    try:
        data = _gcs_client(address).get_cluster_status(timeout_s=_ANSWER_S)
    except RayError as error:
        logger.debug("the cluster's status is asked for over a new connection: %s", error)
        _gcs_client.cache_clear()
        data = _gcs_client(address).get_cluster_status(timeout_s=_ANSWER_S)
    messages: Any = autoscaler_pb2  # Generated code, without annotations.
    return messages.GetClusterStatusReply.FromString(data)


@functools.lru_cache(maxsize=1)
def _gcs_client(address: str) -> Any:
    connect: Any = sdk.GcsClient  # type: ignore[attr-defined]
    return connect(address)


def _unordered_nodes() -> list[NodeState]:
    # Not from the cluster's status, which is true only up to a second after a change.
    free = questions.free_resources()
    leaving = questions.draining_node_ids()
    return [
        NodeState(
            node_id,
            node["NodeManagerAddress"],
            dict(node["Resources"]),
            {name: free[node_id].get(name, 0.0) for name in node["Resources"]},
            dict(node["Labels"]),
            node_id in leaving,
        )
        for node_id, node in _lasting_facts(free.keys()).items()
    ]


def _lasting_facts(node_ids: Set[str]) -> dict[str, Mapping[str, Any]]:
    """What never changes while a node lives; Ray is asked only when a node is not known yet."""
    global _known_nodes
    known = _known_nodes
    if not node_ids <= known.keys():
        # Another thread may have asked before a node joined, and keep its answer after this.
        known = _known_nodes = {node["NodeID"]: node for node in questions.live_nodes()}
    return {node_id: known[node_id] for node_id in node_ids if node_id in known}


def _autoscaler_is_running() -> bool | None:
    status = _status()
    state = status.autoscaling_state
    if state.pending_instance_requests or state.pending_instances:
        return True
    if state.autoscaler_state_version:
        # The second version runs in every cluster where it is switched on, and launches nothing where nodes
        # have no instance behind them.
        dead = autoscaler_pb2.NodeStatus.DEAD  # type: ignore[attr-defined]  # Generated code.
        nodes = status.cluster_resource_state.node_states
        return any(node.instance_id for node in nodes if node.status != dead)
    report = _gcs_client(compat.cluster_address()).internal_kv_get(
        _AUTOSCALER_REPORT, None, timeout=_ANSWER_S
    )
    launches = launches_nodes(json.loads(report)) if report else None
    return None if launches is None and _has_just_started() else bool(launches)


def launches_nodes(report: Mapping[str, Any]) -> bool | None:
    """Whether the first version's report is of an autoscaler that launches nodes, not of one that watches.

    It runs in every cluster; one that only watches makes up a type for each node from the node's id. Its
    first reports name no node, and tell nothing yet: None.
    """
    summary = report.get("autoscaler_report") or {}
    types = summary.get("node_type_mapping") or {}
    if summary.get("pending_launches") or any(kind != f"node_{node_id}" for node_id, kind in types.items()):
        return True
    return False if types else None


def _has_just_started() -> bool:
    """Whether the head node is so young that an autoscaler may not have reported yet."""
    try:
        nodes = _gcs_client(compat.cluster_address()).get_all_node_info(timeout=_ANSWER_S)
        born = [node.start_time_ms / 1000 for node in nodes.values() if node.is_head_node]
    except (AttributeError, TypeError, RayError) as error:
        logger.debug("Ray does not tell how old the head node is: %s", error)
        return False
    return any(abs(time.time() - born_s) < _FIRST_REPORT_S for born_s in born)


def unordered_nodes() -> list[NodeState]:
    """All living nodes; works without the dashboard."""
    return _in_cluster(_unordered_nodes)


def autoscaler_is_running() -> bool | None:
    """Whether an autoscaler launches nodes for this cluster, so that some may come that are not there yet.

    None is not known yet: an autoscaler tells of itself some seconds after the head node started.
    """
    return _in_cluster(_autoscaler_is_running)


def actor_states() -> list[ActorState]:
    """All actors that run, however many; for explanations only, and empty where this Ray does not tell."""
    return _in_cluster(_actor_states)


def _actor_states() -> list[ActorState]:
    try:
        found = _actor_table(actor_state_name="ALIVE")
    except (AttributeError, TypeError, RayError) as error:
        logger.debug("Ray does not tell which actors run: %s", error)
        return []
    return [
        ActorState(
            actor.name,
            actor.class_name,
            actor.address.node_id.hex(),
            {} if actor.placement_group_id else dict(actor.required_resources),
        )
        for actor in found.values()
    ]


def _actor_table(**wanted: Any) -> Mapping[Any, Any]:
    client = _gcs_client(compat.cluster_address())

    async def ask() -> Mapping[Any, Any]:
        found: Mapping[Any, Any] = await client.async_get_all_actor_info(timeout=_ANSWER_S, **wanted)
        return found

    with ThreadPoolExecutor(1) as pool:  # This thread may run an event loop of its own.
        return pool.submit(asyncio.run, ask()).result()


def leftover_groups() -> list[str]:
    """Placement groups that outlived the driver or actor which made them, detached ones that is; by name.

    Empty where this Ray does not tell.
    """
    return _in_cluster(_leftover_groups)


def _leftover_groups() -> list[str]:
    table: Any = gcs_pb2.PlacementGroupTableData  # type: ignore[attr-defined]  # Generated code.
    try:
        entries = [table.FromString(entry) for entry in compat.group_records()]
        return [
            f"{entry.name or 'without a name'} (namespace {entry.ray_namespace})"
            for entry in entries
            if entry.creator_job_dead and entry.creator_actor_dead and entry.state != table.REMOVED
        ]
    except (AttributeError, TypeError, RayError) as error:
        logger.debug("Ray does not tell whose placement groups are left over: %s", error)
        return []


def this_process() -> Process:
    """How Ray knows this process; behind a `ray://` proxy it is no more than a job."""
    with check_connected().while_connected():
        context = ray.get_runtime_context()
    if is_client():
        return Process(context.get_job_id())
    return Process(
        context.get_job_id(), context.get_node_id(), context.get_worker_id(), context.get_actor_id() or ""
    )


def node_id() -> str:
    """Ray id of the node that this process is on, or what speaks for it behind a `ray://` proxy."""
    return str(ask(lambda: ray.get_runtime_context().get_node_id()))


def gone(processes: Collection[Process]) -> set[Process]:
    """Those that are no more: actors and workers that died, and what belonged to a job or node that is over.

    Nobody is gone where this Ray does not tell.
    """
    try:
        return ask(lambda: _gone(processes))
    except (AttributeError, TypeError, RayError) as error:
        logger.debug("Ray does not tell which processes are gone: %s", error)
        return set()


def _gone(processes: Collection[Process]) -> set[Process]:
    found = {process for process in processes if process.actor_id and _actor_is_gone(process)}
    others = {process for process in processes if not process.actor_id}
    if others:
        nodes, over = questions.live_node_ids(), _finished_jobs()
        found |= {p for p in others if p.job_id in over or (p.node_id and p.node_id not in nodes)}
        found |= {p for p in others - found if p.worker_id and _worker_is_gone(p.worker_id)}
    return found


def _finished_jobs() -> set[str]:
    jobs = _gcs_client(compat.cluster_address()).get_all_job_info(
        skip_submission_job_info_field=True, skip_is_running_tasks_field=True, timeout=_ANSWER_S
    )
    return {job_id.hex() for job_id, job in jobs.items() if job.is_dead}


def _worker_is_gone(worker_id: str) -> bool:
    """Whether the process has ended in which tasks ran, or a driver; not before Ray has heard of its end."""
    table: Any = gcs_pb2.WorkerTableData  # type: ignore[attr-defined]  # Generated code, without annotations.
    record = compat.worker_record(worker_id)
    return record is not None and not table.FromString(record).is_alive


def _actor_is_gone(process: Process) -> bool:
    states: Any = gcs_pb2.ActorTableData  # type: ignore[attr-defined]  # Generated code, without annotations.
    for actor in _actor_table(actor_id=ray.ActorID.from_hex(process.actor_id)).values():
        if actor.state == states.ALIVE:  # Ray may have restarted it, without what it knew.
            return bool(actor.address.worker_id.hex() != process.worker_id)
        return actor.state in (states.DEAD, states.RESTARTING)
    return True
