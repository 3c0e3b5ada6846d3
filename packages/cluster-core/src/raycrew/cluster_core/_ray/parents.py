"""In a forked process: Ray's connection is its parent's, and must neither be used nor let go of.

Importing this module is enough.
"""

import atexit
import ctypes
import gc
import os
import sys
from typing import Any, NoReturn

_LETTING_GO = (
    "async_delete_object_ref_stream",
    "close",
    "remove_actor_handle_reference",
    "remove_object_ref_reference",
)
_KNOWN_HERE = (  # What is asked of memory alone; names, or how they begin.
    "current_",
    "get_actor_id",
    "get_actor_name",
    "get_current_",
    "get_job_config",
    "get_placement_group_id",
    "get_task_depth",
    "get_worker_id",
    "resource_ids",
    "should_capture_child_tasks_in_placement_group",
)

# What a child needs of C is looked for before: another thread may hold the lock of the loader.
_C = ctypes.CDLL(None)
_KEEP = ctypes.pythonapi.Py_IncRef
_EXIT, _ON_EXIT = _C._exit, getattr(_C, "on_exit", None)  # noqa: SLF001 - the C function of that name


class _Parents:
    """In place of a part of Ray that speaks on the connection of the process that this one was forked from.

    What a child lets go of, if only because its garbage is collected, Ray tells on that connection, in
    between what the parent says: calls of the parent's are then never answered, or its node ends.
    """

    is_parents = True

    def __init__(self, part: object) -> None:
        self._part = part
        _KEEP(ctypes.py_object(part))  # Its end, too, would be told to the others.

    def __getattr__(self, name: str) -> Any:
        if name in _LETTING_GO:
            return _do_nothing
        return getattr(self._part, name) if name.startswith(_KNOWN_HERE) else _refuse()


def _do_nothing(*_: Any, **_options: Any) -> None:
    return None


def why_not() -> str:
    """What a process is told that was forked from one that uses Ray."""
    return (
        f"process {os.getpid()} was forked from one that uses Ray, and can't use it itself: start it with "
        "the method spawn or forkserver"
    )


def _refuse() -> NoReturn:
    raise RuntimeError(why_not())


def leave_ray_to_parent() -> None:
    """In a forked child: whatever it does or forgets, nothing of it reaches the parent's connection or node.

    Using Ray raises a `RuntimeError`, also `ray.shutdown()`; letting go of references and handles does
    nothing. The child ends when Python does.
    """
    module: Any = sys.modules.get("ray._private.worker")
    worker: Any = getattr(module, "global_worker", None)
    core_worker = getattr(worker, "core_worker", None)
    if core_worker is None or getattr(type(core_worker), "is_parents", False):
        return
    for owner, name in (
        (worker, "core_worker"),
        (worker, "gcs_client"),
        (worker, "gcs_error_subscriber"),
        (worker, "gcs_log_subscriber"),
        (sys.modules["ray._private.state"].state, "_global_state_accessor"),
        (sys.modules["ray._private.state"].state, "global_state_accessor"),  # as it was called before
        (sys.modules.get("ray.experimental.internal_kv"), "global_gcs_client"),
    ):
        if (part := getattr(owner, name, None)) is not None:
            setattr(owner, name, _Parents(part))
    atexit.unregister(module.shutdown)  # which would end a node that the parent has started
    if _ON_EXIT is not None:  # What Ray does when Python has ended waits for threads of the parent's.
        _ON_EXIT(_EXIT, None)
    if sys.excepthook is module.custom_excepthook:
        sys.excepthook = module.normal_excepthook


def _collect_before() -> None:
    """In the parent: a child collects no garbage of its own accord before it has left Ray to its parent."""
    if gc.isenabled():
        gc.collect(0)


os.register_at_fork(before=_collect_before, after_in_child=leave_ray_to_parent)
