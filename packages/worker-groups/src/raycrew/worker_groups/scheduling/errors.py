"""The errors of roles and engines, a tree under `SchedulerError`.

What can not be meant (a `Job` of no replicas, say) is a `ValueError` or `TypeError` where it is made.
"""

from collections.abc import Mapping
from typing import Any

from raycrew.worker_groups.errors import WorkerGroupClosedError, WorkerGroupError


class SchedulerError(WorkerGroupError):
    """Base of every error of roles and engines.

    Attributes:
        role: The role, if known.
        worker_id: The worker, such as "rollout/0", if it is about one.
        method: Method of an engine, or what else the worker was asked.
        cause: What was raised by an engine, a worker group or Ray.
        log_tail: Last lines of the worker's output.
        pid: Process id of the worker on its node, if known.
        node_id: Ray node id, if known.
        details: The same attributes by name, as far as they are known.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = {name: value for name, value in details.items() if value not in (None, "")}
        self.worker_id: str = details.get("worker_id", "")
        self.role: str = details.get("role", "") or self.worker_id.rpartition("/")[0]
        self.method: str = details.get("method", "")
        self.cause: BaseException | None = details.get("cause")
        self.log_tail: str = details.get("log_tail", "")
        self.pid: int | None = details.get("pid")
        self.node_id: str | None = details.get("node_id")
        if self.cause is not None:
            self.__cause__ = self.cause

    def __str__(self) -> str:
        parts = [str(self.args[0])]
        if self.log_tail:
            parts.append(f"--- last lines of its log ---\n{self.log_tail.rstrip()}")
        return "\n".join([*parts, *self._where])

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args[0], self.details), self._state


class SchedulerClosedError(SchedulerError, WorkerGroupClosedError):
    """A scheduler was used after its close."""


class WorkerCreationError(SchedulerError):
    """The workers of a role could not be created; none of them is left."""


class WorkerConfigurationError(SchedulerError):
    """A job contradicts itself or the roles that there are, or a worker could not be configured."""


class WorkerNotFoundError(SchedulerError, LookupError):
    """There is no such role or worker."""


class WorkerFailedError(SchedulerError):
    """A worker's process has died, or can't be reached any more; `cause` says of what.

    Its engines are lost. Delete its role and create it anew.
    """


class WorkerTimeoutError(SchedulerError, TimeoutError):
    """Something was not done within its time; a call that has begun goes on."""


class PortAllocationError(SchedulerError):
    """A worker could not lease the ports that it was to have."""


class EngineCreationError(SchedulerError):
    """The constructor of an engine raised; `cause` is what."""


class EngineImportError(SchedulerError):
    """The class of an engine can't be imported on the worker, or its path is not allowed."""


class EngineCallError(SchedulerError):
    """A method of an engine raised, or there is no such engine or method; `cause` is what was raised."""


def _rebuild(cls: type[SchedulerError], message: str, details: Mapping[str, Any]) -> SchedulerError:
    return cls(message, **details)
