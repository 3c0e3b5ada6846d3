"""Worker groups on Ray: one actor per rank, called as a unit."""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from raycrew.worker_groups._calls import MultiWorkerFuture, Results, wait_any
from raycrew.worker_groups._group import GroupHandle, RayWorkerGroup, Resized
from raycrew.worker_groups._health import (
    Diagnosis,
    RankDiagnosis,
    ResourceUsage,
    RunningCall,
    StuckWorker,
    WorkerStatus,
)
from raycrew.worker_groups._start import RayWorkerBuilder, StartupReport
from raycrew.worker_groups._timeline import (
    GroupShares,
    SlowestRank,
    TimedPhase,
    TimedReport,
    Timeline,
    TimelineStatistics,
    timeline,
)
from raycrew.worker_groups._worker import (
    CommunicationOptions,
    CurrentWorker,
    DeclaredMethod,
    current_worker,
    per_rank,
    rank_zero,
    replicated,
    sharded,
)
from raycrew.worker_groups.balancing import LoadBalancer, WorkerLoad
from raycrew.worker_groups.errors import (
    EnvironmentProviderError,
    GroupResizedError,
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
from raycrew.worker_groups.fan_out import (
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
from raycrew.worker_groups.protocols import (
    ArgumentTransport,
    EnvironmentProvider,
    NodeRunner,
    RowBatch,
    RowHandles,
    Shardable,
    WeightVersions,
)
from raycrew.worker_groups.samples import SampleBatch, SampleQueue, SampleStats
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
    "ItemCrashedError",
    "ItemError",
    "ItemOutcome",
    "ItemTimeoutError",
    "LoadBalancer",
    "MultiWorkerFuture",
    "NamedSharding",
    "NodeRunner",
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
    "per_rank",
    "rank_zero",
    "replicated",
    "sharded",
    "timeline",
    "wait_any",
]

__version__: str

if not TYPE_CHECKING:  # Types are what is listed, whatever may be asked for here.

    def __getattr__(name: str) -> str:
        """The installed version, read when it is asked for."""
        if name == "__version__":
            return _version("raycrew-worker-groups")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
