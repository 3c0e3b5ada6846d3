"""The errors of services, a tree under `ServiceError`.

What can not be meant (no replicas, say) is a `ValueError` or `TypeError` before anything is started.
"""

from collections.abc import Mapping
from typing import Any

from raycrew.worker_groups.errors import WorkerGroupClosedError, WorkerGroupError


class ServiceError(WorkerGroupError):
    """Base of every error of services.

    Attributes:
        rank: Number of the replica, if it is about one.
        exit_code: What its server's process ended with, negative for a signal; None if it has not ended.
        log_tail: Last lines of that process's output.
        details: The same attributes by name, as far as they are known.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = {name: value for name, value in details.items() if value not in (None, "")}
        self.rank: int | None = details.get("rank")
        self.exit_code: int | None = details.get("exit_code")
        self.log_tail: str = details.get("log_tail", "")

    def __str__(self) -> str:
        parts = [str(self.args[0])]
        if self.log_tail:
            parts.append(f"--- last lines of its output ---\n{self.log_tail.rstrip()}")
        return "\n".join([*parts, *self._where])

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args[0], self.details), self._state


class ServiceStartError(ServiceError):
    """A server did not become ready: its process could not be started, or ended."""


class ServiceStartTimeoutError(ServiceStartError, TimeoutError):
    """A server did not become ready in time, though its process ran."""


class ServiceTimeoutError(ServiceError, TimeoutError):
    """Some replicas were not ready in time."""


class ServiceClosedError(ServiceError, WorkerGroupClosedError):
    """A service or a proxy was used after its shutdown."""


def _rebuild(cls: type[ServiceError], message: str, details: Mapping[str, Any]) -> ServiceError:
    return cls(message, **details)
