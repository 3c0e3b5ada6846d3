"""Unusual or version-dependent Ray calls, one function each."""

import importlib
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import ray
from ray.actor import ActorClass, ActorHandle
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError, RayTaskError
from ray.experimental import get_local_object_locations
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycrew.cluster_core import ClusterClosedError, Session
from raycrew.worker_groups._ray.gate import ANSWER_S, ask, current_session
from raycrew.worker_groups.errors import WorkerGroupClosedError

logger = logging.getLogger(__name__)

ActorState = Literal["ready", "busy", "dead"]

# The second: its placement group was removed, or its node is gone, before it was placed.
_GONE = (RayActorError, ActorUnschedulableError)
_UNGRANTED = ("NO_RESOURCES", "INFEASIBLE")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MARKS = re.compile(r"[\s|]*[~^]+")
_FRAME = re.compile(r"[\s|]*File \".*\", line \d+")


def unwrap_actor_class(worker: Any) -> tuple[Any, dict[str, Any]]:
    """The plain class behind a `@ray.remote` class, and the options it was decorated with."""
    if not isinstance(worker, ActorClass):
        return worker, {}
    modified = worker.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    options = {k: v for k, v in getattr(worker, "_default_options", {}).items() if v is not None}
    return modified.__ray_actor_class__, options


def own_node() -> tuple[str, str]:
    """Ray node id and address of the node that this process runs on."""
    return ray.get_runtime_context().get_node_id(), str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def connection() -> str | None:
    """Which connection to Ray this process has: another one after every `ray.init`, None without one."""
    session = Session.current()
    return None if session is None else session.id


def check_session(session: Session | None, whose: str) -> None:
    """Make sure that this process still has a session; otherwise Ray would connect by itself to another.

    Raises:
        WorkerGroupClosedError: It has not, or there never was one.
    """
    if session is None:
        raise WorkerGroupClosedError(f"{whose}: there was no connection to Ray when this was made")
    try:
        session.check()
    except ClusterClosedError as error:
        raise WorkerGroupClosedError(f"{whose}: {error}") from None


def is_behind_proxy() -> bool:
    """Whether this process is connected through a `ray://` proxy."""
    client: Any = ray.util.client.ray
    return bool(client.is_connected())


def assigned_accelerators() -> dict[str, list[str]]:
    """The accelerator ids that Ray assigned to this process, by resource name."""
    return ray.get_runtime_context().get_accelerator_ids()


def runs_in_order(is_async: bool, options: Mapping[str, Any]) -> bool:
    """Whether an actor with these options runs its calls one after the other, in the order of the caller.

    To cancel such a call before Ray has sent it (seen with Ray 2.60) leaves a hole in the order: the actor
    waits for the cancelled call, and answers no later one.
    """
    any_order = options.get("allow_out_of_order_execution")
    if any_order is None:
        any_order = is_async or options.get("max_concurrency", 1) > 1
    return not any_order


def call_id(ref: Any) -> bytes:
    """What tells the call behind an ObjectRef, or a generator of them, from all others."""
    if not isinstance(ref, ray.ObjectRef):
        ref = ref.completed()
    return bytes.fromhex(ref.task_id().hex())


def own_call_id() -> bytes:
    """The `call_id` of the call that this is in."""
    return bytes.fromhex(ray.get_runtime_context().get_task_id() or "")


def call_cancelled(method: str) -> Exception:
    """What a call raises that was taken back before it began."""
    return ray.exceptions.TaskCancelledError(error_message=f"{method} was cancelled before it began")


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
        GetTimeoutError: Ray's control service, which the function goes to first, does not answer.
    """
    options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0}
    if own_process:
        options["max_calls"] = 1
    if node_id is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
    if runtime_env:
        options["runtime_env"] = dict(runtime_env)
    return ask(lambda: ray.remote(**options)(fn).remote(*args))


def start_actor(
    remote_class: Any,
    options: Mapping[str, Any],
    timeout_s: float = ANSWER_S,
    arguments: Sequence[Any] = (),
) -> ActorHandle[Any]:
    """Ask Ray for an actor; does not wait until it runs.

    Raises:
        GetTimeoutError: Ray's control service does not answer; should it make the actor later, that is ended.
    """
    return ask(
        lambda: remote_class.options(**options).remote(*arguments),
        timeout_s=timeout_s,
        undo=lambda handle: ray.kill(handle, no_restart=True),
    )


def own_namespace() -> str:
    """The namespace that names of actors of this process are in."""
    return str(ray.get_runtime_context().namespace)


def find_actor(name: str, namespace: str) -> Any:
    """The handle of a named actor; None where there is none.

    Raises:
        GetTimeoutError: Ray's control service does not answer.
    """
    try:
        return ask(lambda: ray.get_actor(name, namespace))
    except ValueError:
        return None


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


def cause_of(error: BaseException) -> tuple[BaseException, str, int | None]:
    """The worker's own exception, its traceback as text, and its process id, where Ray tells them."""
    if isinstance(error, RayTaskError):
        # The raised object is of both classes; unknown attributes are its cause's, the text is Ray's.
        cause = error.cause if isinstance(error.cause, BaseException) else error
        return cause, without_stray_marks(_COLOURS.sub("", str(error))), vars(error).get("pid")
    return error, "", vars(error).get("pid")


def without_stray_marks(traceback: str) -> str:
    """A traceback without the marks that Python puts under lines which Ray has left out."""
    kept: list[str] = []
    is_source = False  # Of a frame: the line that a mark belongs to.
    for line in traceback.splitlines():
        if is_source or not _MARKS.fullmatch(line):
            kept.append(line)
            is_source = len(kept) > 1 and _FRAME.match(kept[-2]) is not None
    return "\n".join(kept)


def is_death(error: BaseException) -> bool:
    """Whether an error says that the actor's process is gone or can't be reached."""
    return isinstance(error, _GONE)


def may_come_back(error: BaseException) -> bool:
    """Whether an error says no more than that the actor's process can't be reached at the moment."""
    return isinstance(error, ray.exceptions.ActorUnavailableError)


def is_stored(ref: Any) -> bool:
    """Whether a result is in a node's object store, as large ones are; that its worker died is never there.

    Asks nobody. False where it is not known: behind a `ray://` proxy, and of what another process has called.
    """
    if is_behind_proxy():
        return False
    where = get_local_object_locations([ref]).get(ref, {})
    return bool(where.get("node_ids") or where.get("did_spill"))


def actor_states(handles: Sequence[ActorHandle[Any]], timeout_s: float) -> dict[int, ActorState]:
    """Whether each actor answers, keeps its caller waiting, or is gone, by position."""
    session = current_session()
    with session.while_connected():
        refs: list[Any] = [handle.__ray_ready__.remote() for handle in handles]
    done, _ = session.wait(refs, num_returns=len(refs), timeout=timeout_s)
    answered = set(done)
    return {i: _state(session, ref) if ref in answered else "busy" for i, ref in enumerate(refs)}


def _state(session: Session, ref: Any) -> ActorState:
    try:
        session.get(ref)
    except _GONE as error:
        return "busy" if may_come_back(error) else "dead"
    return "ready"


def request_exit(handles: Sequence[ActorHandle[Any]]) -> None:
    """Ask actors to end after what they are doing, with their exit handlers."""
    with current_session().while_connected():
        for handle in handles:
            handle.__ray_terminate__.remote()


def end_actors(handles: Sequence[ActorHandle[Any]]) -> None:
    """Kill actors for good, whatever state they are in."""
    try:
        ask(lambda: [ray.kill(handle, no_restart=True) for handle in handles])
    except GetTimeoutError as error:
        logger.warning("%d actors are killed once Ray can: %s", len(handles), error)


def await_end(handles: Sequence[ActorHandle[Any]], timeout_s: float) -> list[int]:
    """Wait until actors have ended; returns the positions of those that had not by then."""
    deadline, session = time.monotonic() + timeout_s, current_session()
    living = dict(enumerate(handles))
    while living:
        with session.while_connected():
            refs: dict[Any, int] = {
                handle.__ray_ready__.remote(): position for position, handle in living.items()
            }
        for ref, position in refs.items():
            try:
                session.get(ref, timeout=max(0.0, deadline - time.monotonic()))
            except GetTimeoutError:
                return sorted(living)
            except _GONE as error:
                if not may_come_back(error):
                    del living[position]
    return []


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
