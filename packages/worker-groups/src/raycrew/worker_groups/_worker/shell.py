"""The generic actor that becomes any worker.

Its class is generated on the driver with the user's method names, so that a plain Ray handle has them, but it
refers to no module of the user's. In the worker's process it says where it is, is told its rank, sets the
environment, and only then imports the user's class.
"""

import atexit
import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any

import psutil
import ray

from raycrew.cluster_core import DEFAULT_POLICY, PortLease, bind_device, lease_ports
from raycrew.worker_groups._on_nodes import (
    mark_own_process,
    offer_stacks,
    output_paths,
    own_process,
    pid_namespace,
)
from raycrew.worker_groups._ray import assigned_accelerators, call_cancelled, own_call_id, own_node
from raycrew.worker_groups._worker.collecting import collect_at_last, heavy_imports
from raycrew.worker_groups._worker.hearing import HOOK, Hearing
from raycrew.worker_groups._worker.heart import Running, as_text, start_heart, tick
from raycrew.worker_groups._worker.meeting import MeetingPorts
from raycrew.worker_groups._worker.raised import told_to_the_caller
from raycrew.worker_groups._worker.recalls import Inbox
from raycrew.worker_groups._worker.worker_class import ClassSource, load_class
from raycrew.worker_groups.errors import WorkerGroupError
from raycrew.worker_groups.protocols import ArgumentTransport
from raycrew.worker_groups.sharding import RankInfo, WorkerFacts, rank_environment


@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """What the group's caller wishes of collective communication; the worker applies it.

    Attributes:
        gradient_compression: Whether gradients may be compressed on the wire.
        asynchronous: Whether collectives may run beside computation.
    """

    gradient_compression: bool = False
    asynchronous: bool = False


@dataclass(frozen=True, slots=True)
class CurrentWorker(RankInfo):
    """`RankInfo` of the calling worker, and what else it may want to know.

    Attributes:
        device_kind: "cpu", "cuda", "rocm", "npu" or another accelerator's name.
        local_device_index: What this process passes to `set_device`; None without a device.
        communication: Wishes about collective communication.
    """

    device_kind: str = "cpu"
    local_device_index: int | None = None
    communication: CommunicationOptions = field(default_factory=CommunicationOptions)

    def tick(self) -> None:
        """Say that the running call goes on, so that `detect_stuck_workers` does not take it for stuck.

        In a thread that the call has started, it speaks for the call only while no other one runs on this
        worker; what was started with the call's context, as asyncio's tasks and `asyncio.to_thread` are,
        speaks for its call alone, and for none once that has ended. It costs about a microsecond, and does
        nothing in a forked child and outside of workers.
        """
        tick()


@dataclass(frozen=True, slots=True)
class Orders:
    """What a worker is told before its class is imported.

    Attributes:
        worker: Its rank and options.
        env_vars: Variables of the user's, secrets among them.
    """

    worker: CurrentWorker
    env_vars: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Results of another group, passed on: the worker that gets this sees the list of them, or their join."""

    refs: tuple[Any, ...]
    join: Callable[[list[Any]], Any] | None = None


_process_worker: list[CurrentWorker] = []
_context_worker: ContextVar[CurrentWorker | None] = ContextVar("raycrew_current_worker", default=None)


def current_worker() -> CurrentWorker:
    """The worker that the calling code runs in, in any of its threads.

    Raises:
        WorkerGroupError: This process is not a worker of a group.

    Examples:
        >>> class Where:
        ...     def where(self) -> str:
        ...         worker = current_worker()
        ...         return f"{worker.rank} of {worker.world_size}"
        >>> with RayWorkerGroup(cluster, Where) as group:
        ...     group.call(Where.where).get_results()
        ['0 of 2', '1 of 2']
    """
    here = _context_worker.get()
    if here is not None:
        return here
    if not _process_worker:
        raise WorkerGroupError("current_worker() is for code that runs inside a worker of a group")
    return _process_worker[-1]


def be_current(worker: CurrentWorker) -> None:
    """Make `current_worker()` tell of `worker` in this thread or task."""
    _context_worker.set(worker)


def as_current(info: RankInfo, facts: WorkerFacts, communication: CommunicationOptions) -> CurrentWorker:
    """A rank's information with what its process sees of it."""
    shared = {f.name: getattr(info, f.name) for f in fields(RankInfo)}
    return CurrentWorker(
        **shared,
        device_kind=facts.device_kind,
        local_device_index=facts.local_device_index,
        communication=communication,
    )


class Shell:
    """Base of the generated actor classes; see the module's text."""

    def __init__(self) -> None:
        self._raycrew_instance: Any = None
        self._raycrew_transport: ArgumentTransport | None = None
        self._raycrew_meeting: MeetingPorts | None = None
        self._raycrew_lease: PortLease | None = None
        self._raycrew_device: Mapping[str, str] = {}
        self._raycrew_misplaced = ""
        self._raycrew_inbox = Inbox()
        self._raycrew_hearing = Hearing()

    def _raycrew_locate(self, n_ports: int, port_range: tuple[int, int] | None) -> WorkerFacts:
        """Where this process is; leases ports to meet at, in case it gets rank 0, and its own."""
        node_id, address = own_node()
        device = bind_device(assigned_accelerators(), os.environ)
        self._raycrew_device = device.environment
        process, mark = own_process(), mark_own_process()
        atexit.register(self._raycrew_leave)  # before anything of the user's, and so called after all theirs
        start_heart(mark, own_call_id)
        offer_stacks(mark)
        self._raycrew_meeting = MeetingPorts(port_range)
        self._raycrew_lease = lease_ports(n_ports, port_range=port_range) if n_ports else None
        master_port, spare_port = self._raycrew_meeting.ports
        return WorkerFacts(
            node_id=node_id,
            node_address=address,
            pid=process.pid,
            device_kind=device.kind,
            device_index=device.device_index,
            local_device_index=device.local_index,
            master_port=master_port,
            spare_port=spare_port,
            ports=self._raycrew_lease.ports if self._raycrew_lease else (),
            log_paths=output_paths(),
            process_age_s=time.time() - psutil.Process().create_time(),
            inbox=self._raycrew_inbox.address,
            started=process.started,
            pid_namespace=pid_namespace(),
            mark=mark,
        )

    def _raycrew_preload(self, modules: Sequence[str]) -> None:
        """Import modules while there is no rank yet.

        Raises:
            ImportError: One can't be imported; says which.
        """
        self._raycrew_bind_device()  # so that a module which looks for devices finds this worker's
        with Running(as_text("preload")), heavy_imports():
            for name in modules:
                try:
                    importlib.import_module(name)
                except Exception as error:
                    why = f"{type(error).__name__}: {error}"
                    raise ImportError(f"{name!r} of preload= can't be imported: {why}") from error

    def _raycrew_prepare(self, orders: Orders) -> int:
        """Take the rank and its environment, before the user's code is imported; or a new generation's.

        Returns:
            Of rank 0, the port of the generation after this one, or 0 where none is free.
        """
        try:
            self._raycrew_take_place(orders)
        except Exception as error:
            self._raycrew_misplaced = (
                f"generation {orders.worker.generation}: {type(error).__name__}: {error}"
            )
            raise
        self._raycrew_misplaced = ""
        return 0 if self._raycrew_meeting is None else self._raycrew_meeting.take(orders.worker)

    def _raycrew_bind_device(self) -> None:
        for name in DEFAULT_POLICY.scrubbed(os.environ):
            del os.environ[name]
        os.environ.update(self._raycrew_device)

    def _raycrew_take_place(self, orders: Orders) -> None:
        self._raycrew_bind_device()
        os.environ.update(orders.env_vars)
        os.environ.update(rank_environment(orders.worker))
        _process_worker.append(orders.worker)

    def _raycrew_placed(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of the class's `on_generation`, once this worker has the place that they tell of."""
        for orders in args:
            if type(orders) is Orders:
                self._raycrew_prepare(orders)
        return tuple(arg.worker if type(arg) is Orders else arg for arg in args)

    def _raycrew_next_port(self) -> int:
        """Of rank 0, the port of the next generation, once more where none was free before."""
        if self._raycrew_meeting is None:
            raise WorkerGroupError("this worker has not said where it is, so it can't be met there")
        return self._raycrew_meeting.next_port()

    def _raycrew_begin(
        self,
        _prepared: int,
        source: ClassSource,
        transport: ArgumentTransport | None,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[float, float]:
        """Import the user's class and construct it; returns the seconds of both."""
        self._raycrew_transport = transport
        start = time.perf_counter()
        with Running(as_text("__init__")), told_to_the_caller():
            cls = _imported(source)
            imported = time.perf_counter()
            args, kwargs = self._raycrew_received(args, kwargs)
            self._raycrew_instance = cls(*args, **kwargs)
        return imported - start, time.perf_counter() - imported

    def _raycrew_leave(self) -> None:
        """Give the user's object up while Python is still whole, at the end of the process."""
        self._raycrew_instance = None
        collect_at_last()

    def _raycrew_bound(self, name: str) -> Callable[..., Any]:
        if name != HOOK:
            self._raycrew_hearing.await_end()
        if self._raycrew_instance is None:
            raise WorkerGroupError("this worker's __init__ has not returned, so it can't be called yet")
        if self._raycrew_misplaced:
            why = f"this worker could not take its place in {self._raycrew_misplaced}"
            raise WorkerGroupError(f"{why}; renew_rendezvous() of its group tries again")
        if self._raycrew_inbox.has(own_call_id):
            raise call_cancelled(name)
        return getattr(self._raycrew_instance, name)  # type: ignore[no-any-return]

    def _raycrew_received(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        transport = self._raycrew_transport
        if not has_to_receive(transport, args, kwargs):
            return args, kwargs
        return tuple(_receive(v, transport) for v in args), {
            k: _receive(v, transport) for k, v in kwargs.items()
        }

    def _raycrew_sent(self, result: Any) -> Any:
        """A result on its way out; what a transport makes of it stays a handle until someone localises it."""
        return result if self._raycrew_transport is None else self._raycrew_transport.encode(result)


def has_to_receive(
    transport: ArgumentTransport | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether any argument has to be fetched or decoded first."""
    return transport is not None or any(type(v) is Gathered for v in (*args, *kwargs.values()))


def _imported(source: ClassSource) -> type:
    try:
        with heavy_imports():
            return load_class(source)[0]
    except ImportError as error:
        error.add_note("(while its class was imported in the worker: are its modules on PYTHONPATH there?)")
        raise


def _receive(value: Any, transport: ArgumentTransport | None) -> Any:
    if type(value) is Gathered:
        values = [_receive(v, transport) for v in ray.get(list(value.refs))]
        return values if value.join is None else value.join(values)
    return value if transport is None else transport.decode(value)
