"""Starting the workers of a group: all at once, one deadline, and nothing left behind on a failure."""

import logging
import os
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError

from raycrew.cluster_core import Claim, Cluster
from raycrew.worker_groups._failures import Whereabouts, failure, log_tail, start_timeout
from raycrew.worker_groups._options import Configured, WorkerOptions, merge_options
from raycrew.worker_groups._plugins import interpreter_for
from raycrew.worker_groups._ranks import RankInfo, SeatPlan, WorkerFacts, assign_ranks, rank_order
from raycrew.worker_groups._ray_compat import (
    await_end,
    cause_of,
    end_actors,
    is_alive_node,
    run_on_node,
    unwrap_actor_class,
)
from raycrew.worker_groups._report import StartupProgress, StartupReport, Stopwatch, startup_progress
from raycrew.worker_groups._shell import CommunicationOptions, Orders, as_current, shell_class
from raycrew.worker_groups._sizes import SharedStore
from raycrew.worker_groups._waiting import Settled, deadline_after, left, settle
from raycrew.worker_groups._worker_class import (
    ClassInfo,
    ClassSource,
    describe,
    describe_class,
    fqn_of,
    held_class,
    source_of,
)
from raycrew.worker_groups.errors import WorkerFailureError, WorkerStartTimeoutError, combine
from raycrew.worker_groups.protocols import ArgumentTransport, EnvironmentProvider

logger = logging.getLogger(__name__)

Handle = ActorHandle[Any]

_END_TIMEOUT_S = 10.0


class RayWorkerBuilder:
    """A worker class with the arguments of its `__init__`.

    Args:
        worker: A class, a `@ray.remote` class, or a fully qualified name such as "package.module.Class". A
            name is imported in the worker's environment only, never here.
        *args: Positional arguments of `__init__`.
        **kwargs: Keyword arguments of `__init__`.

    Raises:
        TypeError: `worker` is none of these.
    """

    def __init__(self, worker: Any, *args: Any, **kwargs: Any) -> None:
        self.fqn = fqn_of(worker)
        self.worker = worker
        self.args = args
        self.kwargs = kwargs
        self.ray_options: Mapping[str, Any] = {}

    def options(self, **ray_options: Any) -> Self:
        """This builder with Ray actor options; they override the class's own, not `configure_worker`'s."""
        other = type(self)(self.worker, *self.args, **self.kwargs)
        other.ray_options = {**self.ray_options, **ray_options}
        return other

    def __repr__(self) -> str:
        return f"RayWorkerBuilder({self.fqn})"


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """All that a start-up needs to know; see `RayWorkerGroup` for the meaning of each."""

    name: str
    builder: RayWorkerBuilder
    cluster: Cluster
    plan: SeatPlan
    init_kwargs: Mapping[str, Any] = field(default_factory=dict)
    env_vars: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    environments: EnvironmentProvider | Literal["auto"] | None = None
    transport: ArgumentTransport | None = None
    communication: CommunicationOptions = field(default_factory=CommunicationOptions)
    ports_per_worker: int = 2
    port_range: tuple[int, int] | None = None
    init_timeout_s: float = 1200.0
    progress: bool | None = None


@dataclass(slots=True)
class Started:
    """A started group; sequences are in rank order."""

    handles: list[Handle]
    ranks: list[RankInfo]
    facts: list[WorkerFacts]
    order: list[int]
    info: ClassInfo
    report: StartupReport


def start_group(spec: GroupSpec, claim: Claim) -> Started:
    """Start all workers at once and wait until `__init__` has returned on every rank.

    Raises:
        WorkerFailureError: A worker failed or was late; all have been ended.
        ValueError: An option can't be satisfied, or the arguments don't fit `__init__`.
        EnvironmentProviderError: There is no interpreter for the workers.
    """
    with startup_progress(spec.name, len(spec.plan.seats), spec.progress) as progress:
        return _Launch(spec, claim, progress).run()


class _Launch:
    """One start-up, step by step."""

    def __init__(self, spec: GroupSpec, claim: Claim, progress: StartupProgress) -> None:
        self.spec = spec
        self.claim = claim
        self.progress = progress
        self.watch = Stopwatch()
        self.deadline = deadline_after(spec.init_timeout_s)
        self.report = StartupReport(spec.name)
        self.source: ClassSource = source_of(spec.builder.worker)
        self.aliases = worker_aliases(spec.name, spec.plan)
        self.handles: list[Handle] = []

    def run(self) -> Started:
        self.progress.step("environment")
        python = interpreter_for(self.spec.environments, self.spec.builder.fqn, self.spec.cluster)
        info = self._describe(python)
        options = [self._options(info, position, python) for position in range(len(self.spec.plan.seats))]
        self._check_init(info, options)
        self.report.environment_s = self.watch.lap()
        try:
            self._create(info, options)
            facts = self._locate()
            order, ranks = self._rank(facts)
            timings = self._begin(order, ranks, facts, options)
        except BaseException:
            self._end()
            raise
        self._note_phases(order, timings)
        self.report.total_s = self.watch.total_s
        handles = [self.handles[position] for position in order]
        return Started(handles, ranks, [facts[p] for p in order], order, info, self.report)

    def _describe(self, python: str | None) -> ClassInfo:
        requests = [self._request(position) for position in range(len(self.spec.plan.seats))]
        held = held_class(self.spec.builder.worker)
        if held is not None:
            return describe_class(*unwrap_actor_class(held), requests)
        common = merge_options(
            {},
            self.spec.builder.ray_options,
            Configured(),
            {},
            env_vars=self.spec.env_vars,
            py_executable=python,
        )
        node_id = self.claim.bundles[0].node_id
        ref = run_on_node(
            describe_in_environment,
            [self.source, requests, common.env_vars],
            node_id=node_id if is_alive_node(node_id) else None,
            runtime_env=common.actor.get("runtime_env"),
        )
        try:
            return ray.get(ref, timeout=left(self.deadline))  # type: ignore[no-any-return]
        except GetTimeoutError as error:
            raise WorkerStartTimeoutError(
                f"{self.spec.builder.fqn} could not be described in its environment "
                f"({python or 'the default one'}) within {self.spec.init_timeout_s:g} s",
                group_name=self.spec.name,
            ) from error
        except Exception as error:
            cause, traceback, pid = cause_of(error)
            raise WorkerFailureError(
                f"{self.spec.builder.fqn} can't be used as a worker in its environment "
                f"({python or 'the default one'}): {type(cause).__name__}: {cause}",
                group_name=self.spec.name,
                method="import",
                cause=cause,
                traceback=traceback,
                pid=pid,
            ) from error

    def _request(self, position: int) -> dict[str, Any]:
        seat, bundles = self.spec.plan.seats[position], self.claim.bundles
        placement = self.claim.actor_options(position)
        same_node = sum(b.node_index == bundles[position].node_index for b in bundles)
        return {
            "num_gpus": placement.get("num_gpus", 0),
            "bundle_indices": seat.tied_bundles,
            "num_gpus_per_node": same_node if placement.get("num_gpus") else 0,
        }

    def _options(self, info: ClassInfo, position: int, python: str | None) -> WorkerOptions:
        options = merge_options(
            info.options,
            self.spec.builder.ray_options,
            info.configured[position],
            self.claim.actor_options(position),
            env_vars=self.spec.env_vars,
            init_kwargs={**self.spec.builder.kwargs, **self.spec.init_kwargs},
            py_executable=python,
        )
        if options.overridden:
            note = "worker %d of %s: %s.configure_worker overrides the caller's %s"
            logger.info(note, position, self.spec.name, info.name, ", ".join(options.overridden))
        return options

    def _check_init(self, info: ClassInfo, options: Sequence[WorkerOptions]) -> None:
        for worker in options:
            check_init(info, self.spec.builder.args, worker.init_kwargs)

    def _create(self, info: ClassInfo, options: Sequence[WorkerOptions]) -> None:
        shell, remote_class = shell_class(info), cast("Any", ray.remote)
        groups = options[0].actor.get("concurrency_groups")  # Ray takes these with the class only.
        remote = remote_class(concurrency_groups=groups)(shell) if groups else remote_class(shell)
        suffix = uuid.uuid4().hex[:8]
        for position, worker in enumerate(options):
            name = f"{self.aliases[position]}-{suffix}"
            actor = {k: v for k, v in worker.actor.items() if k != "concurrency_groups"}
            # max_restarts=0: Ray would restart a worker with its old rank on another device.
            self.handles.append(remote.options(**actor, name=name, max_restarts=0).remote())

    def _locate(self) -> list[WorkerFacts]:
        self.progress.step("processes")
        ports = (self.spec.ports_per_worker, self.spec.port_range)
        settled = self._settle([handle._raycrew_locate.remote(*ports) for handle in self.handles])  # noqa: SLF001
        self._raise_failed(settled, [self._whereabouts(p) for p in range(len(self.handles))])
        self._located_s = settled.elapsed_s
        return [settled.values[position] for position in range(len(self.handles))]

    def _rank(self, facts: Sequence[WorkerFacts]) -> tuple[list[int], list[RankInfo]]:
        order = rank_order(self.spec.plan, facts)
        devices = {p: fact.device_index for p, fact in enumerate(facts) if fact.device_index is not None}
        if devices:
            self.claim.learn(devices)
        bundle_indices = [bundle.index for bundle in self.claim.bundles]
        self._facts = list(facts)
        return order, assign_ranks(order, facts, bundle_indices, self.spec.name)

    def _begin(
        self,
        order: Sequence[int],
        ranks: Sequence[RankInfo],
        facts: Sequence[WorkerFacts],
        options: Sequence[WorkerOptions],
    ) -> list[tuple[float, float]]:
        self.progress.step("import and __init__")
        store, encode = SharedStore(), self._encoder()
        args = [store.share(encode(arg)) for arg in self.spec.builder.args]
        refs: list[Any] = [None] * len(order)
        for rank, position in enumerate(order):
            handle: Any = self.handles[position]
            worker = options[position]
            env_vars = {**worker.env_vars, **self.spec.secrets}
            current = as_current(ranks[rank], facts[position], self.spec.communication)
            prepared: Any = handle._raycrew_prepare.remote(Orders(current, env_vars, self.spec.transport))  # noqa: SLF001
            kwargs = {name: store.share(encode(value)) for name, value in worker.init_kwargs.items()}
            # `prepared` as an argument keeps the rest from being unpickled before the environment is set.
            refs[position] = handle._raycrew_begin.remote(prepared, store.share(self.source), *args, **kwargs)  # noqa: SLF001
        settled = self._settle(refs)
        rank_of = {position: rank for rank, position in enumerate(order)}
        places = [
            replace(self._whereabouts(p), info=ranks[rank_of[p]], facts=facts[p]) for p in range(len(order))
        ]
        self._raise_failed(settled, places)
        return [settled.values[position] for position in range(len(order))]

    def _encoder(self) -> Any:
        """Encode each object once, however many workers get it."""
        if self.spec.transport is None:
            return lambda value: value
        encoded: dict[int, tuple[Any, Any]] = {}
        transport = self.spec.transport

        def encode(value: Any) -> Any:
            if id(value) not in encoded:
                encoded[id(value)] = (value, transport.encode(value))
            return encoded[id(value)][1]

        return encode

    def _settle(self, refs: Sequence[Any]) -> Settled:
        return settle(refs, self.deadline, on_done=self.progress.advance)

    def _whereabouts(self, position: int) -> Whereabouts:
        bundle = self.claim.bundles[position]
        return Whereabouts(self.spec.name, bundle_index=bundle.index, seat=f"worker {self.aliases[position]}")

    def _raise_failed(self, settled: Settled, places: Sequence[Whereabouts]) -> None:
        if settled.errors:
            failures: list[WorkerFailureError] = []
            pending = [
                info.rank if (info := places[position].info) else position for position in settled.pending
            ]
            for position, error in sorted(settled.errors.items()):
                tail = log_tail(places[position].facts) if len(failures) < 4 else ""
                elapsed = settled.elapsed_s[position]
                where = places[position]
                failures.append(
                    failure(where, error, "__init__", elapsed_s=elapsed, pending=pending, log_tail=tail)
                )
            failures.sort(key=lambda f: -1 if f.rank is None else f.rank)
            raise combine(failures)
        if settled.pending:
            late = [places[position] for position in settled.pending]
            stage = "its __init__ did not return"
            if late[0].facts is None:
                stage = "its process did not answer (it was not placed, or its interpreter does not start)"
            others = [str(place) for place in late[1:]]
            raise start_timeout(late[0], stage, others, self.spec.init_timeout_s, log_tail(late[0].facts))

    def _end(self) -> None:
        end_actors(self.handles)
        if late := await_end(self.handles, _END_TIMEOUT_S):
            logger.warning("%s: %d killed workers are still there", self.spec.name, len(late))

    def _note_phases(self, order: Sequence[int], timings: Sequence[tuple[float, float]]) -> None:
        for rank, position in enumerate(order):
            process_s = min(self._located_s[position], self._facts[position].process_age_s)
            import_s, init_s = timings[position]
            self.report.workers[rank] = {
                "placement": self._located_s[position] - process_s,
                "process": process_s,
                "import": import_s,
                "init": init_s,
            }


def check_init(info: ClassInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check arguments against a worker class's `__init__`.

    Raises:
        TypeError: They don't fit.
    """
    try:
        info.init.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{info.name}.__init__{info.init}: {error}") from None


def worker_aliases(group_name: str, plan: SeatPlan) -> list[str]:
    """The readable name of each position: `prefix-grpG-R` in a tied group, else `prefix-NODE-BUNDLE`."""
    sizes = Counter(seat.tied_group for seat in plan.seats)
    seen: Counter[int] = Counter()
    aliases = []
    for seat in plan.seats:
        node = seat.bundle.node_index
        if sizes[seat.tied_group] > 1:
            aliases.append(f"{group_name}-grp{seat.tied_group}-{seat.place_in_group}")
        else:
            aliases.append(f"{group_name}-{node}-{seen[node]}")
        seen[node] += 1
    return aliases


def describe_in_environment(
    source: ClassSource, requests: Sequence[Mapping[str, Any]], env_vars: Mapping[str, str]
) -> ClassInfo:
    """`describe` as a task of its own, in a process that ends afterwards."""
    os.environ.update(env_vars)
    return describe(source, requests)
