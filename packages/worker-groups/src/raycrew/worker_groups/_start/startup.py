"""Starting the workers of a group: all at once, one deadline, and nothing left behind on a failure."""

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import ray
from ray.actor import ActorHandle

from raycrew.cluster_core import Claim, NodeLostError, Session
from raycrew.worker_groups._calls import (
    Packer,
    Settled,
    SharedStore,
    Whereabouts,
    deadline_after,
    failures_of,
    left,
    log_tail,
    settle,
    start_timeout,
)
from raycrew.worker_groups._health import (
    Ended,
    Publication,
    Subjects,
    end_workers_of,
    follow,
    stand_by,
    tell_of_start,
)
from raycrew.worker_groups._ray import current_session, start_actor, while_connected
from raycrew.worker_groups._start.announcing import announced
from raycrew.worker_groups._start.arguments import (
    check_arguments,
    init_kwargs_of,
    launcher_of,
    of_each_rank,
)
from raycrew.worker_groups._start.bundles import BundleLook
from raycrew.worker_groups._start.describing import describe_worker
from raycrew.worker_groups._start.record import workers_of
from raycrew.worker_groups._start.report import StartupProgress, StartupReport, Stopwatch, starting
from raycrew.worker_groups._start.spec import HOOK, GroupSpec, check_methods, interpreter_for, worker_aliases
from raycrew.worker_groups._worker import (
    ClassInfo,
    ClassSource,
    CurrentWorker,
    Orders,
    WorkerOptions,
    as_current,
    merge_options,
    shell_class,
    source_of,
)
from raycrew.worker_groups.errors import WorkerFailureError
from raycrew.worker_groups.sharding import RankInfo, WorkerFacts, assign_ranks, final_indices, rank_order

logger = logging.getLogger(__name__)

Handle = ActorHandle[Any]

_CREATE_TIMEOUT_S = 30.0
_FOLLOW_TIMEOUT_S = 10.0  # for a node's watch to know of the workers


@dataclass(slots=True)
class Started:
    """A started group; sequences are in rank order."""

    handles: list[Handle]
    ranks: list[RankInfo]
    facts: list[WorkerFacts]
    order: list[int]
    info: ClassInfo
    options: list[WorkerOptions]
    report: StartupReport
    #: Where the next generation meets if rank 0 lives: a port, or a call of rank 0's that says so, or None.
    spare_port: Any = 0
    #: Names of the actors.
    names: list[str] = field(default_factory=list)


def start_group(
    spec: GroupSpec,
    claim: Claim,
    on_end: Callable[[Ended], None],
    go_on: Callable[[], object],
    publication: Publication,
) -> Started:
    """Start all workers at once and wait until `__init__` has returned on every rank.

    Args:
        spec: What the group is to be.
        claim: Where.
        on_end: Told what became of the workers, when the start fails.
        go_on: Called now and then; what it raises ends the workers.
        publication: Others see there how far this is; nothing any more, should it fail.

    Raises:
        WorkerFailureError: A worker failed or was late; all have been ended.
        ClusterError: Bundles are gone; all workers have been ended.
        ValueError: An option can't be satisfied, or the arguments don't fit `__init__`.
        EnvironmentProviderError: There is no interpreter for the workers.
    """
    n_ranks = len(spec.plan.seats)
    with starting(spec, n_ranks) as shown, announced(spec, publication, n_ranks, shown) as progress:
        return Launch(spec, claim, progress, range(n_ranks), on_end, go_on).run()


class Launch:
    """One start-up of the workers at some positions, step by step."""

    def __init__(
        self,
        spec: GroupSpec,
        claim: Claim,
        progress: StartupProgress,
        positions: Sequence[int],
        on_end: Callable[[Ended], None],
        go_on: Callable[[], object],
    ) -> None:
        self.go_on = BundleLook(claim, go_on)
        self.positions = list(positions)
        self.spec = spec
        self.claim = claim
        self.progress = progress
        self.watch = Stopwatch()
        self.deadline = deadline_after(spec.options.init_timeout_s)
        self.report = StartupReport(spec.name)
        self.source: ClassSource = source_of(spec.builder.worker)
        self.aliases = worker_aliases(spec.name, spec.plan)
        self.on_end = on_end
        self.session = current_session()
        self.handles: dict[int, Handle] = {}
        self.names: dict[int, str] = {}
        self.located: dict[int, WorkerFacts] = {}

    def run(self) -> Started:
        self.progress.step("environment")
        python = interpreter_for(self.spec.options.environments, self.spec.builder.fqn, self.spec.cluster)
        info = self._describe(python)
        options = [self._options(info, position, python) for position in range(len(self.spec.plan.seats))]
        self._check_init(info, options)
        check_methods(info, self.spec.options.idempotent_methods)
        self.report.environment_s = self.watch.lap()
        try:
            self._create(info, options)
            located = self._locate()
            facts = [located[position] for position in self.positions]
            indices = final_indices(self.claim, facts)
            order = rank_order(self.spec.plan, indices)
            ranks = assign_ranks(order, facts, indices, self.spec.name)
            told = of_each_rank(self.spec, info, options, order, ranks, self.positions)
            names = [self.names[position] for position in order]
            here = [facts[position] for position in order]
            self.progress.located(workers_of(self.claim, order, names, ranks, here, {}))
            timings = self._begin(order, ranks, facts, told)
            handles = [self.handles[position] for position in order]
            self._tell(info, handles, ranks, here)
        except BaseException:
            self._end()
            raise
        self._note_phases(order, facts, timings)
        return Started(handles, ranks, here, order, info, options, self.report, here[0].spare_port, names)

    def _describe(self, python: str | None) -> ClassInfo:
        claim, positions = self.claim, self.positions
        return describe_worker(self.spec, claim, self.source, python, self.deadline, self.go_on, positions)

    def _options(self, info: ClassInfo, position: int, python: str | None) -> WorkerOptions:
        options = merge_options(
            info.options,
            self.spec.builder.ray_options,
            info.configured[position],
            self.claim.actor_options(position),
            forwarded=self.spec.forwarded,
            env_vars=self.spec.options.variables,
            init_kwargs=init_kwargs_of(self.spec),
            py_executable=python,
            launcher=launcher_of(self.spec.options.launchers, self.aliases[position]),
        )
        if options.overridden:
            note = "worker %d of %s: %s.configure_worker overrides the caller's %s"
            logger.info(note, position, self.spec.name, info.name, ", ".join(options.overridden))
        return options

    def _check_init(self, info: ClassInfo, options: Sequence[WorkerOptions]) -> None:
        for worker in options:
            check_arguments(self.spec, info, worker.init_kwargs, whole=not callable(self.spec.options.init))

    def _create(self, info: ClassInfo, options: Sequence[WorkerOptions]) -> None:
        shell, remote_class = shell_class(info), cast("Any", ray.remote)
        groups = options[0].actor.get("concurrency_groups")  # Ray takes these with the class only.
        remote = remote_class(concurrency_groups=groups)(shell) if groups else remote_class(shell)
        suffix = uuid.uuid4().hex[:8]
        for position in [position for position in self.positions if position not in self.handles]:
            self.go_on()  # else a worker may come to a bundle that was given back meanwhile
            worker = options[position]
            self.names[position] = name = f"{self.aliases[position]}-{suffix}"
            actor = {k: v for k, v in worker.actor.items() if k != "concurrency_groups"}
            # max_restarts=0: Ray would restart a worker with its old rank on another device.
            actor |= {"name": name, "max_restarts": 0}
            patience = left(self.deadline, _CREATE_TIMEOUT_S) or 0.0
            self.handles[position] = start_actor(remote, actor, patience)
        # After the workers, which are to have the processes that Ray has started already.
        stand_by([bundle.node_id for bundle in self.claim.bundles])

    def _locate(self) -> dict[int, WorkerFacts]:
        new = [position for position in self.positions if position not in self.located]
        self.progress.step("processes", [self.aliases[position] for position in new])
        ports = (self.spec.options.ports_per_worker, self.spec.options.port_range)
        handles: list[Any] = [self.handles[position] for position in new]
        with while_connected(self.go_on):
            asked = [handle._raycrew_locate.remote(*ports) for handle in handles]  # noqa: SLF001
        settled = self._settle(asked)
        limit = self.spec.options.memory_limit_bytes
        limited = {i: replace(facts, memory_limit_bytes=limit) for i, facts in settled.values.items()}
        self.located |= {new[i]: facts for i, facts in limited.items()}
        self._raise_failed(settled, [self._whereabouts(position) for position in new])
        follow(list(limited.values()), left(self.deadline, _FOLLOW_TIMEOUT_S) or 0.0)
        self._located_s = {new[i]: seconds for i, seconds in settled.elapsed_s.items()}
        return self.located

    def _begin(
        self,
        order: Sequence[int],
        ranks: Sequence[RankInfo],
        facts: Sequence[WorkerFacts],
        options: Sequence[WorkerOptions],
    ) -> dict[int, tuple[float, float]]:
        info_of = dict(zip(order, ranks, strict=True))
        self.progress.step("import and __init__", [f"rank {info_of[p].rank}" for p in self.positions])
        refs = []
        with while_connected(self.go_on):
            packer, source = Packer(self.spec.transport), SharedStore().share(self.source)
            args = packer.pack(self.spec.builder.args)
            for position in self.positions:
                handle: Any = self.handles[position]
                worker = options[position]
                prepared = self._prepare(handle, self._orders(info_of[position], facts[position], worker))
                kwargs = packer.pack_named(worker.init_kwargs)
                # `prepared` as an argument keeps the rest from being unpickled before the environment is set.
                own = (prepared, source, self.spec.transport)
                refs.append(handle._raycrew_begin.remote(*own, *args, **kwargs))  # noqa: SLF001
        settled = self._settle(refs)
        places = [replace(self._whereabouts(p), info=info_of[p], facts=facts[p]) for p in self.positions]
        self._raise_failed(settled, places)
        return {self.positions[i]: seconds for i, seconds in settled.values.items()}

    def _orders(self, info: RankInfo, facts: WorkerFacts, worker: WorkerOptions) -> Orders:
        current = as_current(info, facts, self.spec.options.communication)
        return Orders(current, {**worker.env_vars, **self.spec.secrets})

    def _prepare(self, handle: Any, orders: Orders) -> Any:
        with while_connected(self.go_on):
            return handle._raycrew_prepare.remote(orders)  # noqa: SLF001

    @staticmethod
    def _has_hook(info: ClassInfo) -> bool:
        return HOOK in info.methods

    def _tell(
        self,
        info: ClassInfo,
        handles: Sequence[Any],
        ranks: Sequence[RankInfo],
        facts: Sequence[WorkerFacts],
        orders: Mapping[int, Orders] | None = None,
    ) -> None:
        """Have all workers, in rank order, do what their class does in a new generation.

        With orders, some take their places in the same call, so that no other one comes in between.
        """
        if not self._has_hook(info):
            return
        self.progress.step(HOOK, [f"rank {rank.rank}" for rank in ranks])
        communication = self.spec.options.communication
        told: list[Orders | CurrentWorker] = [
            as_current(rank, fact, communication) for rank, fact in zip(ranks, facts, strict=True)
        ]
        for rank, own_orders in (orders or {}).items():
            told[rank] = own_orders
        with while_connected(self.go_on):
            asked = [getattr(h, HOOK).remote(own) for h, own in zip(handles, told, strict=True)]
        settled = self._settle(asked)
        places = [Whereabouts(self.spec.name, *place) for place in zip(ranks, facts, strict=True)]
        self._raise_failed(settled, places, HOOK)

    def _settle(self, refs: Sequence[Any]) -> Settled:
        return settle(refs, self.deadline, self.go_on, on_done=self.progress.advance)

    def _whereabouts(self, position: int) -> Whereabouts:
        bundle = self.claim.bundles[position]
        return Whereabouts(self.spec.name, bundle_index=bundle.index, seat=f"worker {self.aliases[position]}")

    def _raise_failed(
        self, settled: Settled, places: Sequence[Whereabouts], method: str = "__init__"
    ) -> None:
        if settled.errors:
            with suppress(NodeLostError):  # The failures of its workers say more.
                self.go_on.look()
            pending = [info.rank for i in settled.pending if (info := places[i].info)]  # if it has one yet
            failed = dict(enumerate(places))
            raise self._told(failures_of(settled.errors, failed, method, settled.elapsed_s, pending), places)
        if settled.pending:
            late = [places[position] for position in settled.pending]
            stage = f"its {method} did not return"
            if late[0].facts is None:
                stage = "its process did not answer (it was not placed, or its interpreter does not start)"
            others = [str(place) for place in late[1:]]
            timeout_s = self.spec.options.init_timeout_s
            error = start_timeout(late[0], stage, others, timeout_s, log_tail(late[0].facts), method)
            raise self._told(error, places)

    def _told(self, error: WorkerFailureError, places: Sequence[Whereabouts]) -> WorkerFailureError:
        """An error that says what all that have a rank were at, if its group's caller wants that."""
        known = [(place.info, place.facts) for place in places if place.info and place.facts]
        ranks, facts = [info for info, _ in known], [own for _, own in known]
        subjects = Subjects(self.spec.builder.fqn, ranks, facts, self.spec.secrets)
        tell_of_start(error, self.spec.name, subjects, self.spec.options.diagnose)
        return error

    def _end(self) -> None:
        with Session.until_set(None):  # a start that is given up ends what it has started all the same
            self.on_end(end_workers_of(self.session, self.handles, self.located))

    def _note_phases(
        self,
        order: Sequence[int],
        facts: Sequence[WorkerFacts],
        timings: Mapping[int, tuple[float, float]],
    ) -> None:
        self.report.total_s = self.watch.total_s
        for rank, position in enumerate(order):
            if position not in timings:
                continue
            located_s = self._located_s.get(position, 0.0)  # of who stood by, none
            process_s = min(located_s, facts[position].process_age_s)
            import_s, init_s = timings[position]
            self.report.workers[rank] = {
                "placement": located_s - process_s,
                "process": process_s,
                "import": import_s,
                "init": init_s,
            }
