"""What no public call of Ray offers, one function each; importing this module does not import Ray."""

import inspect
import os
import sys
import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any

from raycrew.tensor_transport._ray.forks import PerProcess
from raycrew.tensor_transport.errors import TransportError

_HOOK = "ray._private.auto_init_hook"

_Known = tuple[weakref.ref[Any], str]

_known: list[_Known | None] = [None]
_switching = PerProcess(threading.Lock)
_forked_from: list[int] = []
"""The process that used Ray and that this one was forked from, if there is one."""


def _note_fork() -> None:
    ray = sys.modules.get("ray")
    if getattr(ray, "is_initialized", bool)():
        _forked_from[:] = [os.getppid()]


os.register_at_fork(after_in_child=_note_fork)


def ray_module() -> Any:
    """The `ray` module.

    Raises:
        TransportError: Ray is not installed, or was in use when this process was forked.
    """
    if _forked_from:
        raise TransportError(
            f"process {os.getpid()} was forked from {_forked_from[0]}, which uses Ray, and can't use it "
            "itself: start it with the method spawn or forkserver, or let it put with a SharedMemoryBackend"
        )
    try:
        import ray
    except ImportError as error:
        raise TransportError("Ray is not installed: install raycrew-tensor-transport[ray]") from error
    return ray


def connection_name() -> str | None:
    """How Ray names this process's connection: its cluster and job there, or as the client of a proxy.

    None without a connection, and in a process that was forked from one with it. Asks nobody.
    """
    # Ray's public ways to its own ids connect where there is no connection, or ask the proxy.
    module: Any = sys.modules.get("ray._private.worker")
    worker = getattr(module, "global_worker", None)
    if _forked_from or worker is None:
        return None
    return _client_name() or _job_name(module, worker)


def is_client() -> bool:
    """Whether this process is connected through a `ray://` proxy."""
    client: Any = getattr(sys.modules.get("ray.util.client"), "ray", None)
    return client is not None and bool(client.is_connected())


def _client_name() -> str | None:
    if not is_client():
        return None
    client: Any = sys.modules["ray.util.client"]
    behind = client.ray.get_context().client_worker
    return None if behind is None else f"ray-client/{dict(behind.metadata)['client_id']}"


def _job_name(module: Any, worker: Any) -> str | None:
    while worker.connected:
        node, known = worker.node, _known[0]  # Each connection has a node of its own.
        if known is None or known[0]() is not node:
            known = _known[0] = _read(module, worker, node)
        if known is None or worker.node is node:
            return None if known is None else known[1]
    return None


def _read(module: Any, worker: Any, node: Any) -> _Known | None:
    """The job of a connection, from this process's own part of Ray, which must not end meanwhile."""
    with module._connect_or_shutdown_lock:  # noqa: SLF001 - ray.shutdown() holds it
        if not worker.connected or worker.node is not node or worker.current_job_id.is_nil():
            return None
        return weakref.ref(node), f"{node.session_name}/{worker.current_job_id.hex()}"


def no_shutdown() -> AbstractContextManager[Any]:
    """Keeps other threads out of `ray.shutdown()`, once they have left it: for what takes no time."""
    module: Any = sys.modules["ray._private.worker"]
    lock: AbstractContextManager[Any] = module._connect_or_shutdown_lock  # noqa: SLF001
    return lock


def await_shutdown(timeout_s: float) -> None:
    """Return when no other thread is within `ray.shutdown()`, or after a time."""
    module: Any = sys.modules.get("ray._private.worker")
    lock: Any = getattr(module, "_connect_or_shutdown_lock", None)
    if lock is not None and lock.acquire(timeout=timeout_s):
        lock.release()


class _AutoConnect(threading.local):
    """In place of Ray's own switch, which is for the whole process: off in threads that say so.

    The user's code keeps what it had: it connects by itself even after all that this package did.
    """

    def __init__(self, allowed: object) -> None:
        self.allowed = allowed
        self.refusals = 0

    def __bool__(self) -> bool:
        return bool(self.allowed) and not self.refusals


def auto_connect() -> Any:
    """The switch by which most of Ray's functions connect, to whatever cluster they find, or start one.

    As long as its `refusals` are above 0 in a thread, they fail there instead where there is no connection.
    Whichever package of raycrew has put it there, it is for all.
    """
    hook: Any = sys.modules[_HOOK]
    if not hasattr(hook.enable_auto_connect, "refusals"):
        with _switching.here:
            if not hasattr(hook.enable_auto_connect, "refusals"):
                hook.enable_auto_connect = _AutoConnect(hook.enable_auto_connect)
    return hook.enable_auto_connect


def moves_by_nixl() -> bool:
    """Whether this Ray's `put` takes a transport for tensors."""
    return "_tensor_transport" in inspect.signature(ray_module().put).parameters


def core_worker() -> Any:
    """This process's part of Ray, which counts its references; over a session only."""
    ray = ray_module()
    return ray.get_runtime_context().worker.core_worker
