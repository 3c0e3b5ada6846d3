"""Worker groups on Ray: one actor per rank, called as a unit."""

from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from raycrew.worker_groups.errors import (
    EnvironmentProviderError,
    GroupResizedError,
    PhaseError,
    PhaseTimeoutError,
    ResultJoinError,
    ResultTimeoutError,
    SampleJournalError,
    SampleLeaseError,
    SampleQueueClosedError,
    SampleQueueEndedError,
    SampleQueueError,
    SampleQueueTimeoutError,
    UnknownMethodError,
    WorkerFailureError,
    WorkerFailuresError,
    WorkerGroupClosedError,
    WorkerGroupError,
    WorkerMemoryError,
    WorkerStartTimeoutError,
)
from raycrew.worker_groups.protocols import (
    ArgumentTransport,
    EnvironmentProvider,
    NodeRunner,
    RowBatch,
    RowHandles,
    Shardable,
    WeightVersions,
)

if TYPE_CHECKING:
    from raycrew.worker_groups._calls import MultiWorkerFuture, Results, wait_any
    from raycrew.worker_groups._fan_out.calling import (
        FanOutError,
        FunctionLoadError,
        ItemCrashedError,
        ItemError,
        ItemOutcome,
        ItemTimeoutError,
        close_fan_out,
        fan_out,
        fan_out_as_completed,
    )
    from raycrew.worker_groups._group import (
        GroupHandle,
        HighWater,
        PhaseManager,
        PhaseReport,
        PhaseTurn,
        PhaseUse,
        RayWorkerGroup,
        Resized,
        Spare,
    )
    from raycrew.worker_groups._health import (
        Diagnosis,
        RankDiagnosis,
        ResourceUsage,
        RunningCall,
        StuckWorker,
        WorkerStatus,
    )
    from raycrew.worker_groups._health.timeline import (
        GroupShares,
        SlowestRank,
        TimedPhase,
        TimedReport,
        Timeline,
        TimelineStatistics,
        timeline,
    )
    from raycrew.worker_groups._start import RayWorkerBuilder, StartupReport
    from raycrew.worker_groups._worker import (
        CommunicationOptions,
        CurrentWorker,
        DeclaredMethod,
        current_worker,
        heavy_imports,
        per_rank,
        rank_zero,
        replicated,
        sharded,
    )
    from raycrew.worker_groups.balancing import LoadBalancer, WorkerLoad
    from raycrew.worker_groups.rollouts import SampleBatch, SampleQueue, SampleStats
    from raycrew.worker_groups.sharding import NamedSharding, RankInfo

__all__ = [
    "ArgumentTransport",
    "CommunicationOptions",
    "CurrentWorker",
    "DeclaredMethod",
    "Diagnosis",
    "EnvironmentProvider",
    "EnvironmentProviderError",
    "FanOutError",
    "FunctionLoadError",
    "GroupHandle",
    "GroupResizedError",
    "GroupShares",
    "HighWater",
    "ItemCrashedError",
    "ItemError",
    "ItemOutcome",
    "ItemTimeoutError",
    "LoadBalancer",
    "MultiWorkerFuture",
    "NamedSharding",
    "NodeRunner",
    "PhaseError",
    "PhaseManager",
    "PhaseReport",
    "PhaseTimeoutError",
    "PhaseTurn",
    "PhaseUse",
    "RankDiagnosis",
    "RankInfo",
    "RayWorkerBuilder",
    "RayWorkerGroup",
    "Resized",
    "ResourceUsage",
    "ResultJoinError",
    "ResultTimeoutError",
    "Results",
    "RowBatch",
    "RowHandles",
    "RunningCall",
    "SampleBatch",
    "SampleJournalError",
    "SampleLeaseError",
    "SampleQueue",
    "SampleQueueClosedError",
    "SampleQueueEndedError",
    "SampleQueueError",
    "SampleQueueTimeoutError",
    "SampleStats",
    "Shardable",
    "SlowestRank",
    "Spare",
    "StartupReport",
    "StuckWorker",
    "TimedPhase",
    "TimedReport",
    "Timeline",
    "TimelineStatistics",
    "UnknownMethodError",
    "WeightVersions",
    "WorkerFailureError",
    "WorkerFailuresError",
    "WorkerGroupClosedError",
    "WorkerGroupError",
    "WorkerLoad",
    "WorkerMemoryError",
    "WorkerStartTimeoutError",
    "WorkerStatus",
    "close_fan_out",
    "current_worker",
    "fan_out",
    "fan_out_as_completed",
    "heavy_imports",
    "per_rank",
    "rank_zero",
    "replicated",
    "sharded",
    "timeline",
    "wait_any",
]

__version__: str

# Whatever is more than a few classes is imported when it is first used: a process in which Ray or `fan_out`
# runs something of this package needs little of it.
_HOMES = {
    "_calls": ["MultiWorkerFuture", "Results", "wait_any"],
    "_group": [
        "GroupHandle",
        "HighWater",
        "PhaseManager",
        "PhaseReport",
        "PhaseUse",
        "RayWorkerGroup",
        "Resized",
        "Spare",
        "PhaseTurn",
    ],
    "_health": ["Diagnosis", "RankDiagnosis", "ResourceUsage", "RunningCall", "StuckWorker", "WorkerStatus"],
    "_start": ["RayWorkerBuilder", "StartupReport"],
    "_health.timeline": [
        "GroupShares",
        "SlowestRank",
        "TimedPhase",
        "TimedReport",
        "Timeline",
        "TimelineStatistics",
        "timeline",
    ],
    "_worker": [
        "CommunicationOptions",
        "CurrentWorker",
        "DeclaredMethod",
        "current_worker",
        "heavy_imports",
        "per_rank",
        "rank_zero",
        "replicated",
        "sharded",
    ],
    "balancing": ["LoadBalancer", "WorkerLoad"],
    "_fan_out.calling": [
        "FanOutError",
        "FunctionLoadError",
        "ItemCrashedError",
        "ItemError",
        "ItemOutcome",
        "ItemTimeoutError",
        "close_fan_out",
        "fan_out",
        "fan_out_as_completed",
    ],
    "rollouts": ["SampleBatch", "SampleQueue", "SampleStats"],
    "sharding": ["NamedSharding", "RankInfo"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # Types are what is listed, whatever may be asked for here.

    def __getattr__(name: str) -> object:
        """What is imported late, and the installed version, read when it is asked for."""
        if name == "__version__":
            return _version("raycrew-worker-groups")
        if name in _HOMES and not name.startswith("_"):
            return _import_module(f"{__name__}.{name}")
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_import_module(f"{__name__}.{_HOME_OF[name]}"), name)
