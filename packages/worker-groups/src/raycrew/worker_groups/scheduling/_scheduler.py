"""`RayScheduler`: roles whose workers are placed by strategy, and engines on them by import path."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal, Self

from raycrew.cluster_core import Cluster, RayConnection, Session
from raycrew.worker_groups._calls import deadline_after, left
from raycrew.worker_groups._group import RayWorkerGroup, WorkerGroup
from raycrew.worker_groups._health import WorkerStatus, checked_time
from raycrew.worker_groups.protocols import ArgumentTransport, EnvironmentProvider
from raycrew.worker_groups.scheduling._creation import Creation, Wishes
from raycrew.worker_groups.scheduling._ending import end_role
from raycrew.worker_groups.scheduling._engines import EngineCalls
from raycrew.worker_groups.scheduling._job import Job, SchedulingSpec, SchedulingStrategy, Worker
from raycrew.worker_groups.scheduling._plan import check_separable
from raycrew.worker_groups.scheduling._roles import Role, Roles
from raycrew.worker_groups.scheduling._sending import check_alive, told_as
from raycrew.worker_groups.scheduling._server import check_path
from raycrew.worker_groups.scheduling._sites import GivenSites, OwnSites, Sites
from raycrew.worker_groups.scheduling.errors import (
    PortAllocationError,
    WorkerConfigurationError,
    WorkerFailedError,
    WorkerNotFoundError,
    WorkerTimeoutError,
)


class RayScheduler(EngineCalls):
    """Roles, each with workers that are placed by a strategy, and engines on those by import path.

    Each role is one or several worker groups of `RayRPCServer`s, so that what holds for groups holds here:
    nothing is left after a start that failed, a worker has ended when its process and all that it has started
    are gone, and a scheduler that is forgotten gives everything back. A context manager; the end of the block
    deletes all roles.

    Engines run on the main thread of their worker, one call after the other. What a method returns that is a
    future, an ObjectRef or a coroutine is waited for there. With a `transport`, arguments come as the values
    that their handles stand for, and results go as handles.

    Args:
        where: A cluster, whose free bundles the workers take; or the connection to Ray (by default this
            process's), on which each group gets a virtual cluster of its own. Over another connection
            than that it creates nothing.
        engine_paths: Patterns of the classes and functions that may be imported, as in "my.engines.*".
        accelerator: Ray's name of what workers get as accelerators; found among the nodes' resources ("GPU",
            "NPU", …) if there is one kind.
        environments: See `RayWorkerGroup`.
        transport: See `RayWorkerGroup`.
        secrets: See `RayWorkerGroup`.
        port_range: First and last port that workers lease.
        startup_timeout_s: Deadline of `create_workers`, unless it is given one.
        call_timeout_s: Deadline of calls of workers and engines, unless they are given one. These times, and
            those of the methods, are finite numbers of seconds of at least 0.
        group_class: The class of the worker groups; an `InProcessGroup` does without Ray, for tests.

    Raises:
        TypeError: `where` is neither a cluster nor a connection, or a time is no number.
        ValueError: A time can't be meant.

    Examples:
        >>> with RayScheduler(cluster) as scheduler:
        ...     ids = scheduler.create_workers(Job("counter", 2))
        ...     for worker_id in ids:
        ...         scheduler.create_engine(worker_id, "collections.Counter", None, "abca")
        ...     print(ids, scheduler.call_engine(ids[1], "most_common", None, 1))
        ['counter/0', 'counter/1'] [('a', 2)]
    """

    def __init__(
        self,
        where: Cluster | RayConnection | None = None,
        *,
        engine_paths: Sequence[str] = ("*",),
        accelerator: str | None = None,
        environments: EnvironmentProvider | Literal["auto"] | None = None,
        transport: ArgumentTransport | Literal["auto"] | None = None,
        secrets: Sequence[str] = (),
        port_range: tuple[int, int] | None = None,
        startup_timeout_s: float = 1200.0,
        call_timeout_s: float = 7200.0,
        group_class: type[WorkerGroup] = RayWorkerGroup,
    ) -> None:
        if isinstance(engine_paths, str):
            raise TypeError(f"engine_paths is a sequence of patterns, as in [{engine_paths!r}]")
        self._engine_paths = tuple(engine_paths)
        wishes = Wishes(
            engine_paths=self._engine_paths,
            environments=environments,
            transport=transport,
            secrets=secrets,
            port_range=port_range,
            group_class=group_class,
        )
        self._creation = Creation(_sites(where, accelerator, port_range), wishes)
        self._startup_timeout_s = checked_time("startup_timeout_s", startup_timeout_s)
        self._call_timeout_s = checked_time("call_timeout_s", call_timeout_s)
        self._roles = Roles()

    # Roles.

    def create_workers(self, job: Job, timeout_s: float | None = None) -> list[str]:
        """Create the workers of a role, all of them or none.

        Args:
            job: What they are to be.
            timeout_s: Deadline; by default the scheduler's `startup_timeout_s`.

        Returns:
            Their ids, "role/number".

        Raises:
            WorkerConfigurationError: The job contradicts itself, the cluster or the roles that there are.
            WorkerCreationError: They could not be created.
            WorkerTimeoutError: They were late.
            PortAllocationError: One found no ports.
            WorkerNotFoundError: There is no such role as they are to share devices with.
            SchedulerClosedError: The scheduler was closed, perhaps meanwhile; nothing of them is left.
            TypeError: `job` is no `Job`.
        """
        if not isinstance(job, Job):
            raise TypeError(f"workers are created for a Job, not for {job!r}")
        deadline = self._until(timeout_s)
        with self._roles.creating(job) as take_in:
            role = self._created(job, deadline)
            with ExitStack() as undo:
                undo.callback(end_role, role, 0.0)
                take_in(role)
                undo.pop_all()
        return list(job.worker_ids)

    def _created(self, job: Job, deadline: float | None) -> Role:
        strategy = job.scheduling_strategy
        if not strategy.target:
            return self._creation.of_its_own(job, left(deadline) or 0.0)
        target = self._roles.await_role(strategy.target, deadline)
        if strategy.type == "separation":
            check_separable(job, target.job)
            return self._creation.of_its_own(job, left(deadline) or 0.0)
        if strategy.fork:
            return self._creation.beside(job, target, left(deadline) or 0.0)
        return self._creation.second_name(job, target)

    def fork_workers(
        self, role: str, target_role: str, spec: SchedulingSpec | None = None, timeout_s: float | None = None
    ) -> list[str]:
        """Create a role whose workers are processes of their own, each on the devices of one of another's.

        Args:
            role: The new role.
            target_role: That other one. It can't be deleted before the new one is.
            spec: Variables, ports and command of the new processes; by default none, two and none.
            timeout_s: See `create_workers`, as for what is returned and raised.
        """
        deadline = self._until(timeout_s)
        target = self._roles.await_role(target_role, deadline)
        strategy = SchedulingStrategy("colocation", target_role, fork=True)
        job = Job(role, target.job.replicas, [spec or SchedulingSpec()], strategy)
        return self.create_workers(job, left(deadline))

    def get_workers(self, role: str, timeout: float | None = None) -> list[Worker]:
        """The workers of a role, once they have been created, each with its own address and ports.

        One whose node does not answer in time counts as alive, and the log has a warning.

        Args:
            role: The role.
            timeout: Seconds to wait; by default the scheduler's `startup_timeout_s`.

        Raises:
            WorkerNotFoundError: There is no such role.
            WorkerTimeoutError: It is still being created.
            WorkerFailedError: One of them has died; `cause` says of what, as far as Ray knows.
        """
        deadline = self._until(timeout, "timeout")
        found = self._roles.await_role(role, deadline)
        check_alive(found, left(deadline) or 0.0)
        return found.workers(self._origin(found).job.specs)

    def delete_workers(
        self, role: str | None = None, reverse_order: bool = False, timeout: float = 30.0
    ) -> bool:
        """End the workers of a role, or of all roles, in phases.

        Engines are destroyed on all workers at once, on number 0 once the others have, as it may hold what
        they need; then processes end, what is late is killed, and the places are given back. Of a role that
        is a second name for another's workers, only engines that were made under it are destroyed, and ports
        that were leased under it given back.

        Args:
            role: The role; None for all, those on another role's devices before that one.
            reverse_order: Whether the engines of a role are destroyed one after the other, those of the last
                worker first.
            timeout: Seconds for each role to end by itself; with 0 its processes are killed at once.

        Returns:
            Whether all ended by themselves and nothing is left.

        Raises:
            WorkerNotFoundError: There is no such role.
            WorkerConfigurationError: Other roles are on its devices.
            WorkerTimeoutError: It is still being created.
        """
        timeout = checked_time("timeout", timeout)
        if role is not None:
            with self._roles.deleting(role, deadline_after(timeout)) as found:
                return end_role(found, timeout, reverse_order)
        is_clean, late = True, None
        for name in self._roles.names():
            try:
                is_clean &= self.delete_workers(name, reverse_order, timeout)
            except WorkerNotFoundError:
                continue  # somebody else has deleted it
            except (WorkerTimeoutError, WorkerConfigurationError) as error:
                late = error  # the others end all the same
        if late is not None:
            raise late
        return is_clean

    def close(self) -> bool:
        """Delete all roles; idempotent. Gives what `delete_workers` does.

        In a forked process this does nothing and gives False: the workers are its parent's.
        """
        if not self._roles.are_own:
            return False
        self._roles.close()
        return self.delete_workers()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> str:
        raise TypeError("a scheduler stays in its process and can't be pickled; pass ids of its workers on")

    def __repr__(self) -> str:
        return f"RayScheduler({', '.join(reversed(self._roles.names())) or 'no roles'})"

    # Workers.

    def ping(self, worker_id: str, timeout_s: float = 5.0) -> WorkerStatus:
        """What a worker is up to, "ready", "busy" or "dead", as its node sees it.

        The worker itself is not asked, so this answers at once during any call. `silent_s` is the age of the
        last `current_worker().tick()` of the call that runs.

        Raises:
            WorkerNotFoundError: There is none of this id.
            WorkerTimeoutError: Its node does not answer.
        """
        _, seat = self._roles.seat(worker_id)
        timeout_s = checked_time("timeout_s", timeout_s)
        with told_as(worker_id, "ping", WorkerFailedError):
            told = seat.group.ping([seat.rank], timeout_s)
        if not told:
            raise WorkerTimeoutError(f"{worker_id}: its node does not answer", worker_id=worker_id)
        return told[seat.rank]

    def alloc_ports(self, worker_id: str, count: int = 1, timeout_s: float | None = None) -> tuple[int, ...]:
        """Lease more ports on a worker, for its engines; `get_workers` has them, too.

        They stay leased until the worker's role is deleted, also those of a call that was late, which nobody
        hears of.

        Raises:
            PortAllocationError: There are not so many.
            SchedulerError: The worker could not be asked.
        """
        role, seat = self._roles.seat(worker_id)
        role.hosts.add(worker_id)
        ports: tuple[int, ...] = self._ask(
            seat, worker_id, "alloc_ports", PortAllocationError, timeout_s, (count, role.name), {}
        )
        role.engine_ports[worker_id] = (*role.engine_ports.get(worker_id, ()), *ports)
        return ports

    def set_worker_env(
        self, worker_id: str, env_vars: Mapping[str, str], timeout_s: float | None = None
    ) -> None:
        """Set variables of a worker's process, for engines that are created later.

        Raises:
            WorkerConfigurationError: No environment can hold one.
            SchedulerError: The worker could not be asked.
        """
        _, seat = self._roles.seat(worker_id)
        self._ask(seat, worker_id, "set_env", WorkerConfigurationError, timeout_s, (dict(env_vars),), {})

    def configure_worker(
        self, worker_id: str, function: str, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Any:
        """Call a function by import path in a worker's process, such as one that seeds random numbers.

        Raises:
            EngineImportError: It can't be imported there, or is not allowed.
            WorkerConfigurationError: It has raised.
            SchedulerError: The worker could not be asked.
        """
        check_path(function, self._engine_paths)
        _, seat = self._roles.seat(worker_id)
        asked = (function, *args)
        return self._ask(seat, worker_id, "configure", WorkerConfigurationError, timeout_s, asked, kwargs)

    def _until(self, timeout_s: float | None, name: str = "timeout_s") -> float | None:
        """The deadline of what waits for a role to be created."""
        return deadline_after(self._startup_timeout_s if timeout_s is None else checked_time(name, timeout_s))

    def _origin(self, role: Role) -> Role:
        """The role whose processes a role's workers are."""
        while not role.parts:
            role = self._roles.await_role(role.target, deadline_after(0.0))
        return role


def _sites(
    where: Cluster | RayConnection | None, accelerator: str | None, port_range: tuple[int, int] | None
) -> Sites:
    if where is None or isinstance(where, RayConnection):
        session = Session.current() if where is None else where.session
        return OwnSites(session, accelerator, port_range)
    if not isinstance(where, Cluster):
        raise TypeError(f"where is a cluster or a connection to Ray, not {where!r}")
    return GivenSites(where, accelerator)
