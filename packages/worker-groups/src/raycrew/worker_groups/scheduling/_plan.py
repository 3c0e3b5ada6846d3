"""From a job to worker groups and bundles; pure."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from raycrew.cluster_core import Bundle, BundleSpec
from raycrew.worker_groups.scheduling._job import Job, SchedulingSpec
from raycrew.worker_groups.scheduling.errors import WorkerConfigurationError, WorkerCreationError


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One worker group of a role.

    Attributes:
        name: Its name.
        specs: What each of its workers is given.
        bundles: What it needs of the cluster.
        is_deferred: Whether its only worker takes nothing of these, which are for what it starts.
    """

    name: str
    specs: tuple[SchedulingSpec, ...]
    bundles: tuple[BundleSpec, ...]
    is_deferred: bool = False

    @property
    def port_count(self) -> int:
        """Ports that each of its workers leases; some may need fewer."""
        return max(spec.port_count for spec in self.specs)


def plan_groups(job: Job) -> tuple[GroupPlan, ...]:
    """The worker groups of a role that has devices of its own, in the order of its workers.

    Raises:
        WorkerConfigurationError: Workers of one group would have to be started in different ways.
        ValueError: A worker's accelerators can't be deferred.
    """
    strategy = job.scheduling_strategy.type
    if strategy == "deferred":
        pairs = zip(job.worker_ids, job.specs, strict=True)
        return tuple(GroupPlan(name, (spec,), deferred_bundles(spec), True) for name, spec in pairs)
    if strategy == "separate":
        pairs = zip(job.worker_ids, job.specs, strict=True)
        return tuple(GroupPlan(name, (spec,), (bundle_of(spec),)) for name, spec in pairs)
    check_started_alike(job)
    return (GroupPlan(job.role, job.specs, tuple(map(bundle_of, job.specs))),)


def check_started_alike(job: Job) -> None:
    """Check that the workers of a role can be one group.

    Raises:
        WorkerConfigurationError: They would be started by different commands, or in different environments.
    """
    for option in ("cmd", "environment"):
        if len({str(getattr(spec, option)) for spec in job.specs}) > 1:
            why = f"workers of {job.role!r} differ in {option}, which those of one group can't"
            raise _refused(job, f"{why}; use the strategy 'separate'")


def bundle_of(spec: SchedulingSpec) -> BundleSpec:
    """The bundle of one worker."""
    return BundleSpec(cpus=spec.cpu, gpus=spec.gpu, memory=spec.memory_bytes)


def deferred_bundles(spec: SchedulingSpec) -> tuple[BundleSpec, ...]:
    """A bundle for each accelerator of a worker, or each whole CPU, with its part of everything else.

    Raises:
        ValueError: It has a part of one.
    """
    count = spec.gpu or spec.cpu
    if count != int(count) or not count:
        raise ValueError(f"deferred workers have whole accelerators, or whole CPUs, not {count:g}")
    each = BundleSpec(cpus=spec.cpu / count, gpus=spec.gpu / count, memory=int(spec.memory_bytes // count))
    return (each,) * int(count)


def choose_bundles(
    bundles: Sequence[Bundle],
    taken: Collection[int],
    wanted: Sequence[BundleSpec],
    *,
    accelerator: str = "GPU",
    slots: int = 1,
) -> list[int]:
    """Bundles of a cluster for some workers, in their order: the largest choose first, what fits best.

    Where that leaves one without, those that chose before it move; no other choice changes.

    Args:
        bundles: Those of the cluster.
        taken: Indices of those that are not free.
        wanted: What each worker needs.
        accelerator: Ray's name of what `gpus` counts.
        slots: How many groups share each bundle; a worker gets one part.

    Raises:
        WorkerCreationError: The free bundles are too few or too small for all of them together.
    """
    needs = [one.amounts(accelerator) for one in wanted]
    free = {b.index: {k: v / slots for k, v in b.resources.items()} for b in bundles if b.index not in taken}
    seated: dict[int, int] = {}
    for position in sorted(range(len(wanted)), key=lambda p: _weight(needs[p]), reverse=True):
        if not _seat(position, needs, free, seated):
            left = [has for index, has in free.items() if index not in seated]
            raise WorkerCreationError(
                f"no free bundle has {needs[position]} for one more worker; free are {left}, "
                f"and {len(taken)} of {len(bundles)} bundles are taken"
            )
    chosen = {position: index for index, position in seated.items()}
    return [chosen[position] for position in range(len(wanted))]


def _seat(
    position: int,
    needs: Sequence[dict[str, float]],
    free: Mapping[int, dict[str, float]],
    seated: dict[int, int],
) -> bool:
    """Seat a worker on the bundle that fits best, or on one that others leave, of whom the fewest move.

    Args:
        position: The worker's.
        needs: By position.
        free: What each bundle has.
        seated: The workers on bundles; those that move are told here.
    """
    leaving: dict[int, tuple[int, int] | None] = {position: None}  # for whom, and which bundle
    waiting = deque([position])
    while waiting:
        one = waiting.popleft()
        fitting = [index for index, has in free.items() if _fits(needs[one], has)]
        empty = [index for index in fitting if index not in seated]
        if empty:
            seated[min(empty, key=lambda index: (_surplus(needs[one], free[index]), index))] = one
            while (left := leaving[one]) is not None:
                one, index = left
                seated[index] = one
            return True
        for index in fitting:
            if seated[index] not in leaving:
                leaving[seated[index]] = one, index
                waiting.append(seated[index])
    return False


def _fits(need: dict[str, float], has: dict[str, float]) -> bool:
    return all(has.get(name, 0.0) >= amount - 1e-9 for name, amount in need.items())


def _surplus(need: dict[str, float], has: dict[str, float]) -> tuple[float, ...]:
    """What of a bundle would be lost."""
    return _weight({name: amount - need.get(name, 0.0) for name, amount in has.items()})


def _weight(resources: dict[str, float]) -> tuple[float, ...]:
    """How much it is, accelerators first."""
    others = sum(v for k, v in resources.items() if k not in ("CPU", "memory"))
    return others, resources.get("CPU", 0.0), resources.get("memory", 0.0)


def check_colocated(job: Job, target: Job) -> None:
    """Check that a role can be on the devices of another one.

    Raises:
        WorkerConfigurationError: It has more workers or wants more than those have, or wants what processes
            that run already can't be given.
    """
    check_started_alike(job)
    said = f"role {job.role!r} can't be on the devices of {target.role!r}"
    if job.replicas > target.replicas:
        raise _refused(job, f"{said}: it has {job.replicas} workers, and that one {target.replicas}")
    for number, (own, theirs) in enumerate(zip(job.specs, target.specs, strict=False)):
        if own.gpu and target.scheduling_strategy.type == "deferred":
            why = "those of a deferred role are for what its engines start"
            raise _refused(job, f"{said}: worker {number} wants {own.gpu:g} accelerators, and {why}")
        if own.gpu > theirs.gpu:
            raise _refused(job, f"{said}: worker {number} wants {own.gpu:g} accelerators, not {theirs.gpu:g}")
        if not job.scheduling_strategy.fork and (own.env_vars or own.cmd or own.environment):
            own_ones = "with env_vars, cmd or environment of its own"
            raise _refused(job, f"{said} {own_ones}: these processes run already; use fork=True")


def check_separable(job: Job, target: Job) -> None:
    """Check that a role with devices of its own is on none of another one's.

    Raises:
        WorkerConfigurationError: Both want parts of accelerators, and those may be of the same ones.
    """
    if all(any(0 < spec.gpu < 1 for spec in one.specs) for one in (job, target)):
        why = "both want parts of accelerators, which may be parts of one; give either whole ones"
        raise _refused(job, f"role {job.role!r} can't be kept apart from {target.role!r}: {why}")


def _refused(job: Job, why: str) -> WorkerConfigurationError:
    return WorkerConfigurationError(why, role=job.role)


def the_one_accelerator(found: Iterable[str]) -> str:
    """The only kind of accelerator that there is; "GPU" where there is none, which Ray then says.

    Raises:
        WorkerConfigurationError: There are several.
    """
    kinds = sorted(set(found))
    if len(kinds) > 1:
        raise WorkerConfigurationError(
            f"the cluster has several kinds of accelerators, {', '.join(kinds)}: say which as accelerator="
        )
    return kinds[0] if kinds else "GPU"
