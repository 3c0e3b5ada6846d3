"""Unusual or version-dependent Ray calls, one function each."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import ray
from ray._private.worker import global_worker
from ray.actor import ActorClass
from ray.experimental import get_local_object_locations

from raycrew.worker_groups._ray.sessions import is_behind_proxy

_TASK_ID_BYTES = 24
_SLICE_S = 1.0


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


def own_namespace() -> str:
    """The namespace that names of actors of this process are in."""
    return str(ray.get_runtime_context().namespace)


def own_job() -> str:
    """The job that this process works for."""
    return str(ray.get_runtime_context().get_job_id())


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
    return bytes(ref.binary()[:_TASK_ID_BYTES])  # those of its task come first


def own_call_id() -> bytes:
    """The `call_id` of the call that this is in; empty outside of calls.

    The runtime context has it only as text, which takes four times as long.
    """
    task = global_worker.core_worker.get_current_task_id()  # type: ignore[attr-defined]
    return b"" if task.is_nil() else bytes(task.binary())


def call_cancelled(method: str) -> Exception:
    """What a call raises that was taken back before it began."""
    return ray.exceptions.TaskCancelledError(error_message=f"{method} was cancelled before it began")


def raised_by(ref: Any, go_on: Callable[[], object]) -> BaseException | None:
    """What a call raised that has ended, or None; of `ray.get` Ray would warn in an async actor.

    Args:
        ref: The call.
        go_on: Called now and then; waiting ends with what it raises.
    """
    ended: Future[Any] = ref.future()
    while True:
        with suppress(TimeoutError):
            return ended.exception(_SLICE_S)
        go_on()


#: Larger results go to a node's object store, and so does nothing that Ray says of a death.
_INLINE_BYTES = 100 << 10


def is_stored(ref: Any) -> bool:
    """Whether a result is in a node's object store, as large ones are; that its worker died is never there.

    Asks nobody. False where it is not known: behind a `ray://` proxy, and of what another process has called.
    """
    if is_behind_proxy():
        return False
    where = get_local_object_locations([ref]).get(ref, {})
    # That it is somewhere may be heard a moment before where.
    is_large = (where.get("object_size") or 0) > _INLINE_BYTES
    return bool(where.get("node_ids") or where.get("did_spill") or is_large)
