"""Which roles there are, where their workers are, and who waits for whom; no calls."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from raycrew.worker_groups._calls import left
from raycrew.worker_groups._group import WorkerGroup
from raycrew.worker_groups.scheduling._job import Job, SchedulingSpec, Worker
from raycrew.worker_groups.scheduling.errors import (
    SchedulerClosedError,
    WorkerConfigurationError,
    WorkerNotFoundError,
    WorkerTimeoutError,
)


class Seat(NamedTuple):
    """A worker of a role: which rank of which group, and which devices it sees."""

    group: WorkerGroup
    rank: int
    devices: Mapping[str, str]


class Part(NamedTuple):
    """A worker group of a role, and what gives its place back."""

    group: WorkerGroup
    release: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Role:
    """A role whose workers run.

    Attributes:
        job: What it is to be.
        seats: Its workers, by number.
        parts: Its own groups, none of which it has if it is a second name for another role's workers.
        hosts: Ids of its workers that were asked to make an engine, or to lease ports.
        engine_ports: Ports that were allocated later, by worker id.
    """

    job: Job
    seats: Sequence[Seat]
    parts: Sequence[Part] = ()
    hosts: set[str] = field(default_factory=set)
    engine_ports: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The role."""
        return self.job.role

    @property
    def target(self) -> str:
        """The role whose devices it is on; empty for none."""
        return self.job.scheduling_strategy.shares_with

    def workers(self, specs: Sequence[SchedulingSpec]) -> list[Worker]:
        """Its workers; `specs` are those of the role whose processes they are."""
        told = []
        for worker_id, seat, spec in zip(self.job.worker_ids, self.seats, specs, strict=False):
            info = seat.group.ranks[seat.rank]
            ports = info.ports[: spec.port_count]
            named = dict(zip(spec.port_names, ports, strict=False))
            more = self.engine_ports.get(worker_id, ())
            told.append(Worker(worker_id, info.node_address, ports, more, named))
        return told


class Roles:
    """The roles of a scheduler; one that is being created or deleted is waited for."""

    def __init__(self) -> None:
        self._roles: dict[str, Role | None] = {}
        self._targets: dict[str, str] = {}
        self._births: dict[str, object] = {}
        self._changed = threading.Condition()
        self._closed, self._pid = False, os.getpid()

    @contextmanager
    def creating(self, job: Job) -> Iterator[Callable[[Role], None]]:
        """Within, a role is being created; what this gives takes the role in once it runs.

        That raises `SchedulerClosedError` if the scheduler was closed meanwhile. The role whose devices it is
        to be on can't be deleted meanwhile.

        Raises:
            WorkerConfigurationError: There is such a role already.
            WorkerNotFoundError: There is no such role as it is to share devices with, or to be apart from.
            SchedulerClosedError: The scheduler was closed.
        """
        name, strategy = job.role, job.scheduling_strategy
        self._check_process()
        with self._changed:
            self.check()
            if name in self._roles:
                raise WorkerConfigurationError(
                    f"there is a role {name!r} already; delete it first", role=name
                )
            if strategy.target:
                self._found(strategy.target)
            self._roles[name], self._targets[name] = None, strategy.shares_with
            self._births[name] = object()
        try:
            yield self._take_in
        finally:
            with self._changed:
                if self._roles[name] is None:
                    del self._roles[name], self._targets[name], self._births[name]
                self._changed.notify_all()

    def _take_in(self, role: Role) -> None:
        with self._changed:
            self.check()
            self._roles[role.name] = role

    def await_role(self, name: str, deadline: float | None) -> Role:
        """A role, once it has been created.

        Raises:
            WorkerNotFoundError: There is none.
            WorkerTimeoutError: It is still being created, or deleted.
        """
        self._check_process()
        with self._changed:
            while (role := self._found(name)) is None:
                if not self._changed.wait(left(deadline)):
                    raise WorkerTimeoutError(f"role {name!r} is still being created or deleted", role=name)
            return role

    def _found(self, name: str) -> Role | None:
        if name not in self._roles:
            raise WorkerNotFoundError(f"there is no role {name!r}; there are {list(self._roles)}", role=name)
        return self._roles[name]

    @contextmanager
    def deleting(self, name: str, deadline: float | None) -> Iterator[Role]:
        """Within, a role is being deleted; it is gone afterwards, come what may.

        Raises:
            WorkerNotFoundError: There is none, or another one by now.
            WorkerTimeoutError: It is still being created, or deleted by somebody else.
            WorkerConfigurationError: Other roles are on its devices.
        """
        self._check_process()
        with self._changed:
            birth = self._births.get(name)
            role = self.await_role(name, deadline)
            if self._births[name] is not birth:
                raise WorkerNotFoundError(
                    f"role {name!r} was deleted by somebody else, and then created anew", role=name
                )
            if users := self.users_of(name):
                raise WorkerConfigurationError(
                    f"role {name!r} shares its devices with {users}; delete those first", role=name
                )
            self._roles[name] = None
        try:
            yield role
        finally:
            with self._changed:
                del self._roles[name], self._targets[name], self._births[name]
                self._changed.notify_all()

    def users_of(self, name: str) -> list[str]:
        """The roles that are on the devices of one."""
        return [other for other, target in self._targets.items() if target == name]

    def seat(self, worker_id: str) -> tuple[Role, Seat]:
        """A worker of a role that runs.

        Raises:
            WorkerNotFoundError: There is none.
            TypeError: The id is no text.
        """
        self._check_process()
        if not isinstance(worker_id, str):
            raise TypeError(f"the id of a worker is a text such as 'rollout/0', not {worker_id!r}")
        name, _, number = worker_id.rpartition("/")
        role = self._roles.get(name)
        place = int(number) if number.isdecimal() and number == str(int(number)) else -1  # "00" is none
        if role is None or not 0 <= place < len(role.seats):
            with self._changed:
                self.check()
                known = [one for own in self._roles.values() if own is not None for one in own.job.worker_ids]
            raise WorkerNotFoundError(f"there is no worker {worker_id!r}; there are {known}")
        return role, role.seats[place]

    def names(self) -> list[str]:
        """The names of all roles, those on another's devices before that one, else the newest first."""
        names = list(self._roles)  # without the lock, which nobody may ever give back in a forked process
        return names[::-1]  # a role is created before those on its devices are

    def check(self) -> None:
        """Raise if the scheduler was closed.

        Raises:
            SchedulerClosedError: It was, or is of another process.
        """
        self._check_process()
        if self._closed:
            raise SchedulerClosedError("this scheduler was closed")

    @property
    def are_own(self) -> bool:
        """Whether they are of this process, and not of that which it was forked from."""
        return os.getpid() == self._pid

    def _check_process(self) -> None:
        if not self.are_own:
            raise SchedulerClosedError("this scheduler is of the process that this one was forked from")

    def close(self) -> None:
        """Take no new roles."""
        with self._changed:
            self._closed = True
