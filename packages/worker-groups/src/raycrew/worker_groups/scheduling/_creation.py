"""Creating the workers of a role: its groups at once, under one deadline, all of them or none."""

from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Event, Lock
from typing import Any, Literal

from ray.exceptions import RayError

from raycrew.cluster_core import ClusterError, PortsExhaustedError, Session
from raycrew.worker_groups._calls import deadline_after, left
from raycrew.worker_groups._group import RayWorkerGroup, WorkerGroup
from raycrew.worker_groups._start import EnvironmentOf, RayWorkerBuilder
from raycrew.worker_groups.errors import WorkerFailureError, WorkerGroupError
from raycrew.worker_groups.protocols import ArgumentTransport, EnvironmentProvider
from raycrew.worker_groups.scheduling._at_once import in_threads
from raycrew.worker_groups.scheduling._ending import end_parts
from raycrew.worker_groups.scheduling._job import Job, SchedulingSpec
from raycrew.worker_groups.scheduling._plan import GroupPlan, check_colocated, plan_groups
from raycrew.worker_groups.scheduling._roles import Part, Role, Seat
from raycrew.worker_groups.scheduling._server import RayRPCServer
from raycrew.worker_groups.scheduling._sites import Site, Sites
from raycrew.worker_groups.scheduling.errors import (
    PortAllocationError,
    SchedulerError,
    WorkerConfigurationError,
    WorkerCreationError,
    WorkerTimeoutError,
)
from raycrew.worker_groups.sharding import RankInfo

_LEAST_S = 0.001  # what is too late is told by who is


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What all workers of a scheduler have in common."""

    engine_paths: Sequence[str]
    environments: EnvironmentProvider | Literal["auto"] | None
    transport: ArgumentTransport | Literal["auto"] | None
    secrets: Sequence[str]
    port_range: tuple[int, int] | None
    group_class: type[WorkerGroup] = RayWorkerGroup


class Creation:
    """Creates roles on some sites.

    Args:
        sites: Finds places.
        wishes: What all workers have in common.
    """

    def __init__(self, sites: Sites, wishes: Wishes) -> None:
        self._sites, self._wishes = sites, wishes

    def of_its_own(self, job: Job, timeout_s: float) -> Role:
        """A role with devices of its own.

        Raises:
            SchedulerError: It could not be created; nothing of it is left.
        """
        with _told_of(job):
            plans, deadline = plan_groups(job), deadline_after(timeout_s)
            parts = _all_or_none([partial(self._part, plan, deadline) for plan in plans])
            return self._role(job, parts, deadline)

    def beside(self, job: Job, target: Role, timeout_s: float) -> Role:
        """A role whose workers are processes of their own on the devices of another's.

        Raises:
            SchedulerError: It could not be created; nothing of it is left.
        """
        with _told_of(job):
            check_colocated(job, target.job)
            seats, deadline = target.seats[: job.replicas], deadline_after(timeout_s)
            places = dict.fromkeys(seat.group for seat in seats)
            makers, first = [], 0
            for group in places:
                ranks = [seat.rank for seat in seats if seat.group is group]
                specs = job.specs[first : first + len(ranks)]
                devices = [seat.devices for seat in seats[first : first + len(ranks)]]
                plan = GroupPlan(job.role if len(places) == 1 else job.worker_ids[first], specs, ())
                site = Site(group.places_beside(), [[rank] for rank in ranks])
                makers.append(partial(self._started, plan, site, deadline, devices))
                first += len(ranks)
            return self._role(job, _all_or_none(makers), deadline, [seat.devices for seat in seats])

    @staticmethod
    def second_name(job: Job, target: Role) -> Role:
        """A role that is a second name for the workers of another.

        Raises:
            WorkerConfigurationError: It wants what those don't have.
        """
        check_colocated(job, target.job)
        return Role(job, target.seats[: job.replicas])

    def _part(self, plan: GroupPlan, deadline: float | None) -> Part:
        site = self._sites.take(plan, max(left(deadline) or 0.0, _LEAST_S))
        with ExitStack() as undo:
            undo.callback(_in_full, site.release)
            part = self._started(plan, site, deadline)
            undo.pop_all()
        return part

    def _started(
        self,
        plan: GroupPlan,
        site: Site,
        deadline: float | None,
        devices: Sequence[Mapping[str, str]] = (),
    ) -> Part:
        wishes = self._wishes
        server = RayWorkerBuilder(RayRPCServer, list(wishes.engine_paths), wishes.port_range)
        group = wishes.group_class(
            site.cluster,
            server,
            name_prefix=plan.name,
            bundle_indices_list=site.seating,
            env_vars=variables_of(plan.specs, devices),
            secrets=wishes.secrets,
            launchers={"*": plan.specs[0].cmd} if plan.specs[0].cmd else None,
            environments=environment_of(plan, wishes.environments),
            transport=wishes.transport,
            ports_per_worker=plan.port_count,
            port_range=wishes.port_range,
            init_timeout_s=max(left(deadline) or 0.0, _LEAST_S),
            progress=False,
        )
        return Part(group, site.release)

    @staticmethod
    def _role(
        job: Job, parts: Sequence[Part], deadline: float | None, devices: Sequence[Mapping[str, str]] = ()
    ) -> Role:
        with ExitStack() as undo:
            undo.callback(end_parts, parts, None, force=True)
            role = Role(job, _seats(job, [part.group for part in parts], deadline, devices), parts)
            undo.pop_all()
        return role


def _seats(
    job: Job, groups: Sequence[WorkerGroup], deadline: float | None, devices: Sequence[Mapping[str, str]]
) -> list[Seat]:
    """The seats of a role; which devices each sees is asked of the workers, where that is not known."""
    places = [(group, rank) for group in groups for rank in range(group.world_size)]
    ranks = [info for group in groups for info in group.ranks]
    if devices:
        return [Seat(*place, own) for place, own in zip(places, devices, strict=True)]
    devices = [{}] * len(places)
    if any(spec.gpu for spec in job.specs) or any(info.device_index is not None for info in ranks):
        asked = [group.call(RayRPCServer.visible_devices) for group in groups]
        devices = [told for answer in asked for told in answer.get_results(timeout=left(deadline))]
    return [Seat(*place, own) for place, own in zip(places, devices, strict=True)]


def environment_of(
    plan: GroupPlan, environments: EnvironmentProvider | Literal["auto"] | None
) -> EnvironmentProvider | Literal["auto"] | None:
    """Who knows the interpreter of a group's workers.

    Raises:
        WorkerConfigurationError: They name an environment, and nobody knows any.
    """
    named = plan.specs[0].environment
    if not named:
        return environments
    if environments is None:
        raise WorkerConfigurationError(
            f"{plan.name} is to have the environment of {named}: give the scheduler environments, as 'auto'"
        )
    return EnvironmentOf(environments, named)


def variables_of(
    specs: Sequence[SchedulingSpec], devices: Sequence[Mapping[str, str]] = ()
) -> Mapping[str, str] | Callable[[RankInfo], Mapping[str, str]]:
    """The variables of a group's workers: for all of them, or a function of the rank where they differ."""
    masks = devices or [{}] * len(specs)
    each = [{**spec.env_vars, **mask} for spec, mask in zip(specs, masks, strict=True)]
    return each[0] if all(own == each[0] for own in each) else partial(_of_rank, each)


def _of_rank(each: Sequence[Mapping[str, str]], info: RankInfo) -> Mapping[str, str]:
    return each[info.rank]


def _all_or_none(makers: Sequence[Callable[[], Part]]) -> list[Part]:
    """Parts, all made at once; where one fails, the others are given up, and its error is raised.

    What was made by then has ended.
    """
    if len(makers) == 1:
        return [makers[0]()]
    made = _Made()
    with ExitStack() as undo:
        undo.callback(made.give_up)
        parts = in_threads(made.tried, makers)
        if made.errors:
            first, *others = made.errors
            for other in others:
                first.add_note(f"(and another of its {len(makers)} groups: {other})")
            raise first
        undo.pop_all()
    return parts


class _Made:
    """Parts that threads make; once they are given up, nobody waits for one, and whoever made one ends it.

    Attributes:
        errors: Why there are not all of them, what failed first before the others.
    """

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self._parts: list[Part] = []
        self._unwanted = Event()
        self._is_given_up = False
        self._lock = Lock()

    def tried(self, maker: Callable[[], Part]) -> Part | None:
        """A part; where there is none, the waits of those who make the others end."""
        try:
            with Session.until_set(self._unwanted):
                Session.check_wanted()
                part = maker()
        except Exception as error:  # noqa: BLE001 - raised once all are done
            self.errors.append(error)
            self._unwanted.set()
            return None
        except CancelledError:
            if not self._unwanted.is_set():
                raise
            return None
        with self._lock:
            self._parts.append(part)
            is_late = self._is_given_up
        if is_late:
            end_parts([part], None, force=True)
        return part

    def give_up(self) -> None:
        """End those that were made, and those that will be; nobody waits for these, as after Ctrl-C."""
        self._unwanted.set()
        with self._lock:
            self._is_given_up = True
            parts = list(self._parts)
        end_parts(parts, None, force=True)


def _in_full(give_back: Callable[[], object]) -> None:
    """Give something back, also where whoever took it was given up."""
    with Session.until_set(None):
        give_back()


@contextmanager
def _told_of(job: Job) -> Iterator[None]:
    """Within, what keeps a role from being created is raised as an error of the scheduler."""
    try:
        yield
    except SchedulerError:
        raise
    except (WorkerGroupError, ClusterError, RayError, ValueError, TypeError) as error:
        raise creation_error(job, error) from error


def creation_error(job: Job, error: Exception) -> SchedulerError:
    """What an error of groups, clusters or Ray is for who creates a role."""
    said = f"the workers of {job.role!r} could not be created"
    known: dict[str, Any] = {"role": job.role, "cause": error}
    if isinstance(error, TimeoutError):
        return WorkerTimeoutError(f"{said} in time: {error}", **known)
    if isinstance(error, WorkerFailureError):
        known |= {"pid": error.pid, "node_id": error.node_id, "log_tail": error.log_tail}
        kind = PortAllocationError if isinstance(error.cause, PortsExhaustedError) else WorkerCreationError
        return kind(f"{said}: {error.message}", **known)
    if isinstance(error, ValueError | TypeError):
        return WorkerConfigurationError(f"{said}: {error}", **known)
    return WorkerCreationError(f"{said}: {error}", **known)
