"""Roles and engines: workers placed by strategy, and engines made and called on them by import path."""

from raycrew.worker_groups.scheduling._job import Job, SchedulingSpec, SchedulingStrategy, Worker
from raycrew.worker_groups.scheduling._scheduler import RayScheduler
from raycrew.worker_groups.scheduling._server import Broadcaster, RayRPCServer
from raycrew.worker_groups.scheduling.errors import (
    EngineCallError,
    EngineCreationError,
    EngineImportError,
    PortAllocationError,
    SchedulerClosedError,
    SchedulerError,
    WorkerConfigurationError,
    WorkerCreationError,
    WorkerFailedError,
    WorkerNotFoundError,
    WorkerTimeoutError,
)

__all__ = [
    "Broadcaster",
    "EngineCallError",
    "EngineCreationError",
    "EngineImportError",
    "Job",
    "PortAllocationError",
    "RayRPCServer",
    "RayScheduler",
    "SchedulerClosedError",
    "SchedulerError",
    "SchedulingSpec",
    "SchedulingStrategy",
    "Worker",
    "WorkerConfigurationError",
    "WorkerCreationError",
    "WorkerFailedError",
    "WorkerNotFoundError",
    "WorkerTimeoutError",
]
