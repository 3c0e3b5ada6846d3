"""What no public call of Ray offers, or what its versions do in different ways; one function each."""

import asyncio
import importlib
import logging
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import ray

from raycrew.cluster_core._ray.forks import PerProcess

_Known = tuple[weakref.ref[Any], str]

# Ray's public ways to its own ids connect where there is no connection, or ask the proxy.
_worker_module: Any = importlib.import_module("ray._private.worker")
_auto_connect: Any = importlib.import_module("ray._private.auto_init_hook")
_WARNED = "blocking_get_inside_async_warned"
_switching = PerProcess(threading.Lock)
_known: list[_Known | None] = [None]
_parents: list[weakref.ref[Any]] = []


def is_client() -> bool:
    """Whether this process is connected through a `ray://` proxy."""
    client: Any = ray.util.client.ray
    return bool(client.is_connected())


def client_id() -> str | None:
    """What a `ray://` proxy calls this process; None where it is not connected to one."""
    client: Any = ray.util.client.ray
    worker = client.get_context().client_worker
    return None if worker is None or _is_parents(worker) else str(dict(worker.metadata)["client_id"])


def _disown() -> None:
    """In a forked child: the connections are its parent's, which `parents` keeps from being used."""
    client: Any = ray.util.client.ray
    behind = client.get_context().client_worker if is_client() else None
    held = (_worker_module.global_worker.node, behind)
    _parents[:] = [weakref.ref(one) for one in held if one is not None]


os.register_at_fork(after_in_child=_disown)


def _is_parents(connection: Any) -> bool:
    return any(one() is connection for one in _parents)


def is_forked() -> bool:
    """Whether this process was forked from one that was connected to Ray: then it can't connect itself."""
    return any(one() is not None for one in _parents)


def job_id() -> str | None:
    """This process's cluster, and its job there; None without a connection of its own. Asks nobody."""
    worker: Any = _worker_module.global_worker
    while worker.connected and not _is_parents(worker.node):
        node, known = worker.node, _known[0]  # Each connection has a node of its own.
        if known is None or known[0]() is not node:
            known = _known[0] = _read(worker, node)
        if known is None or worker.node is node:
            return None if known is None else known[1]
    return None


def _read(worker: Any, node: Any) -> _Known | None:
    """The job of a connection, from this process's own part of Ray, which must not end meanwhile."""
    with _worker_module._connect_or_shutdown_lock:  # noqa: SLF001 - ray.shutdown() holds it
        if not worker.connected or worker.node is not node or worker.current_job_id.is_nil():
            return None
        return weakref.ref(node), f"{node.session_name}/{worker.current_job_id.hex()}"


def no_shutdown() -> AbstractContextManager[Any]:
    """Keeps other threads out of `ray.shutdown()`, once they have left it: for what takes no time."""
    lock: AbstractContextManager[Any] = _worker_module._connect_or_shutdown_lock  # noqa: SLF001
    return lock


def await_shutdown(timeout_s: float) -> None:
    """Return when no other thread is within `ray.shutdown()`, or after a time.

    Between two of its steps Ray ends the process if another thread as much as drops an ObjectRef.
    """
    lock = _worker_module._connect_or_shutdown_lock  # noqa: SLF001
    if lock.acquire(timeout=timeout_s):
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


class _Warned:
    """In place of Ray's note that it has warned of a blocking `ray.get` in an actor with coroutines.

    Ray warns of any thread. Of what this package asks where no event loop runs it has no need to.
    """

    def __init__(self, switch: _AutoConnect) -> None:
        self.switch = switch

    def __bool__(self) -> bool:
        return bool(self.switch.refusals) and not _runs_a_loop()


def _runs_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextmanager
def never_connecting() -> Iterator[None]:
    """What this thread asks of Ray in here fails where there is no connection (any more), or never was.

    Else most of Ray's functions connect, to whatever cluster they find, or start one: so do `remote()`,
    `put`, `get`, `wait`, `kill` and `cancel`.
    """
    switch = _auto_connect.enable_auto_connect
    if not isinstance(switch, _AutoConnect):
        with _switching.here:  # or two threads have switches of their own
            switch = _auto_connect.enable_auto_connect
            if not isinstance(switch, _AutoConnect):
                switch = _auto_connect.enable_auto_connect = _AutoConnect(switch)
                if getattr(_worker_module, _WARNED, None) is False:
                    setattr(_worker_module, _WARNED, _Warned(switch))
    switch.refusals += 1
    try:
        yield
    finally:
        switch.refusals -= 1


def node_table() -> Any:
    """What `ray.nodes()` asks; Ray has no public call that tells what is free node by node."""
    return importlib.import_module("ray._private.state").state


def node_address() -> str:
    """IP address of the node that this process runs on."""
    address: Any = ray.util.get_node_ip_address
    return str(address())


def cluster_address() -> str:
    """`host:port` of the cluster that this process is connected to."""
    with never_connecting():
        return str(ray.get_runtime_context().gcs_address)


def init(**options: Any) -> tuple[Any, dict[str, str]]:
    """`ray.init` without its side effects on the environment, Ray's loggers and the SIGTERM handler.

    The processes of a cluster that is started inherit no address of another one, which all that they start
    would join.

    Returns:
        Ray's context, and the variables that Ray set, which are gone from `os.environ` again.
    """
    environ, logger, handler = _of_ray(), logging.getLogger("ray"), signal.getsignal(signal.SIGTERM)
    state = (list(logger.handlers), logger.level, logger.propagate)
    try:
        if options.get("address") == "local":
            os.environ.pop("RAY_ADDRESS", None)
        context = ray.init(configure_logging=False, **options)
    finally:
        changed = {name: value for name, value in _of_ray().items() if environ.get(name) != value}
        for name in changed:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in environ.items() if os.environ.get(name) != value})
        logger.handlers[:], logger.level, logger.propagate = state
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
    return context, changed


def _of_ray() -> dict[str, str]:
    """The variables that Ray may set in this process; other threads may set all others meanwhile."""
    names = [name for name in list(os.environ) if name.startswith("RAY_") or name == "PYTHONBREAKPOINT"]
    return {name: value for name in names if (value := os.environ.get(name)) is not None}


def group_records() -> list[bytes]:
    """All placement groups as Ray's control service keeps them, serialised; for explanations only.

    Raises:
        AttributeError: This Ray has no such call.
        TypeError: It is called in another way.
    """
    accessor = _state_accessor()
    return [] if accessor is None else list(accessor.get_placement_group_table())


def worker_record(worker_id: str) -> bytes | None:
    """What Ray's control service keeps of a worker's process, serialised; None where it keeps nothing.

    Raises:
        AttributeError: This Ray has no such call.
        TypeError: It is called in another way.
    """
    accessor = _state_accessor()
    if accessor is None:
        return None
    found: bytes | None = accessor.get_worker_info(ray.WorkerID(bytes.fromhex(worker_id)))
    return found


def _state_accessor() -> Any:
    """What reads the tables of the control service, or None where that does not answer."""
    state: Any = importlib.import_module("ray._raylet")
    options = state.GcsClientOptions.create(
        cluster_address(), None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False
    )
    accessor = state.GlobalStateAccessor(options)
    return accessor if accessor.connect() else None
