"""The errors of this package, a tree under `WorkerGroupError`.

Bad arguments are `ValueError` or `TypeError` and are raised before anything is sent.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self


class WorkerGroupError(Exception):
    """Base of every error that this package raises on its own account.

    Attributes:
        diagnosis: Folder with what all ranks were at, where their group makes diagnoses by itself.
    """

    diagnosis: Path | None = None

    @property
    def _where(self) -> list[str]:
        return [] if self.diagnosis is None else [f"what all ranks were at lies in {self.diagnosis}"]

    @property
    def _state(self) -> dict[str, Any] | None:
        """What a pickle has besides the arguments."""
        return None if self.diagnosis is None else {"diagnosis": self.diagnosis}


class WorkerGroupClosedError(WorkerGroupError):
    """A worker group was used after its shutdown, or a timeline after its end."""


class GroupResizedError(WorkerGroupError, ValueError):
    """The group got fewer or more workers after a call was made for those before.

    Nothing was sent; but a call of an idempotent method, whose worker died, may have run before.
    """


class UnknownMethodError(WorkerGroupError, AttributeError):
    """The worker class has no method of that name."""


class EnvironmentProviderError(WorkerGroupError):
    """The interpreter of a worker's environment can't be had; the cause says why."""


class ResultJoinError(WorkerGroupError):
    """The results of a method can't be joined as its declaration says; the calls themselves went well."""


class ResultTimeoutError(WorkerGroupError, TimeoutError):
    """Some ranks did not answer before the deadline; their calls go on and can be waited for again.

    Attributes:
        pending: Ranks that have not answered.
    """

    def __init__(self, message: str, pending: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.pending = tuple(pending)

    def __str__(self) -> str:
        return "\n".join([self.message, *self._where])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.pending), self._state


class PhaseError(WorkerGroupError):
    """A group can't have its turn on the devices that it shares; the cause says why, if a step failed.

    Attributes:
        member: The name of the group among those that share them.
    """

    def __init__(self, message: str, member: str = "") -> None:
        super().__init__(message, member)
        self.member = member

    def __str__(self) -> str:
        return "\n".join([str(self.args[0]), *self._where])


class PhaseTimeoutError(PhaseError, TimeoutError):
    """A turn did not come in time: another one's went on, or a step was late and goes on in workers."""


class SampleQueueError(WorkerGroupError):
    """A queue of samples can't do what was asked.

    Attributes:
        may_be_done: Whether it may have been done all the same, as no answer came.
    """

    def __init__(self, message: str, *, may_be_done: bool = False) -> None:
        super().__init__(message)
        self.may_be_done = may_be_done


class SampleQueueClosedError(SampleQueueError):
    """A queue of samples was used after it was closed, or its actor is gone."""


class SampleQueueEndedError(SampleQueueError):
    """No more samples come and none is left, or one was put after the end."""


class SampleQueueTimeoutError(SampleQueueError, TimeoutError):
    """Not enough samples, no room for new ones, or no answer in time; the message says which."""


class SampleLeaseError(SampleQueueError):
    """A batch was settled whose samples may belong to another consumer by now."""


class SampleJournalError(SampleQueueError):
    """What a queue wrote down can't be used: damaged, of another queue, or in use by another process."""


class WorkerFailureError(WorkerGroupError):
    """A worker failed: its code raised, its process died, or it did not start in time.

    Attributes:
        message: What failed, where, and the next step, without traceback and log.
        rank: Rank of the worker; None if it failed before ranks were assigned.
        group_name: Name of its group.
        method: Name of the method that was running; `__init__` during start-up.
        node_id: Ray node id, if known.
        node_address: IP address of the node, if known.
        bundle_index: Bundle that the worker occupies.
        device_index: Physical device on its node, if it has one.
        pid: Process id on its node, if known.
        elapsed_s: Seconds between the call and its failure.
        cause: The exception of the worker, or the one that Ray raised about it.
        traceback: Remote traceback as text.
        log_tail: Last lines of the worker's log.
        pending: Ranks that had not answered when this was raised.
        details: The same attributes by name, as far as they are known.
    """

    message: str

    def __init__(self, message: str, **details: Any) -> None:
        vars(self)["message"] = message  # An ExceptionGroup's own attribute can't be assigned.
        self.details = details
        self.rank: int | None = details.get("rank")
        self.group_name: str = details.get("group_name", "")
        self.method: str = details.get("method", "")
        self.node_id: str | None = details.get("node_id")
        self.node_address: str | None = details.get("node_address")
        self.bundle_index: int | None = details.get("bundle_index")
        self.device_index: int | None = details.get("device_index")
        self.pid: int | None = details.get("pid")
        self.elapsed_s: float | None = details.get("elapsed_s")
        self.cause: BaseException | None = details.get("cause")
        self.traceback: str = details.get("traceback", "")
        self.log_tail: str = details.get("log_tail", "")
        self.pending: tuple[int, ...] = tuple(details.get("pending", ()))
        Exception.__init__(self, message)
        if self.cause is not None:
            self.__cause__ = self.cause

    def __str__(self) -> str:
        parts = [self.message]
        if self.traceback:
            parts.append(self.traceback.rstrip())
        if self.log_tail:
            parts.append(f"--- last lines of its log ---\n{self.log_tail.rstrip()}")
        return "\n".join([*parts, *self._where])

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.details), self._state


class WorkerMemoryError(WorkerFailureError):
    """A worker's process was ended because it had more private memory than its group's `memory_limit`.

    Attributes:
        limit_bytes: The limit.
        measured_bytes: What it had.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message, **details)
        self.limit_bytes: int = details.get("limit_bytes", 0)
        self.measured_bytes: int = details.get("measured_bytes", 0)


class WorkerStartTimeoutError(WorkerFailureError, TimeoutError):
    """A worker did not finish its `__init__` before the deadline of its group's start-up."""


class WorkerFailuresError(WorkerFailureError, ExceptionGroup[WorkerFailureError]):
    """Several workers failed; caught by `except WorkerFailureError` and by `except*`.

    Its attributes are those of the first failure. `exceptions` holds them all: first those of workers that
    died, for their peers may have failed of that; then the others; each in rank order.
    """

    exceptions: tuple[WorkerFailureError, ...]

    def __new__(cls, message: str, failures: Sequence[WorkerFailureError], **_: Any) -> Self:
        """ExceptionGroup takes its parts here."""
        return ExceptionGroup.__new__(cls, message, failures)

    def __init__(self, message: str, failures: Sequence[WorkerFailureError], **details: Any) -> None:
        super().__init__(message, **{**failures[0].details, **details})

    def derive(self, failures: Sequence[WorkerFailureError]) -> "WorkerFailuresError":  # type: ignore[override]
        """The same error with some of its parts, as `except*` needs it."""
        derived = type(self)(self.message, failures, pending=self.pending)
        derived.diagnosis = self.diagnosis
        return derived

    def __str__(self) -> str:
        parts = [f"[{i}] {part.message}" for i, part in enumerate(self.exceptions)]
        return "\n".join([self.message, *parts, *self._where])

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (type(self), self.message, self.exceptions, {"pending": self.pending})
        return _rebuild_group, arguments, self._state


def _rebuild(cls: type[WorkerFailureError], message: str, details: Mapping[str, Any]) -> WorkerFailureError:
    return cls(message, **details)


def _rebuild_group(
    cls: type[WorkerFailuresError],
    message: str,
    failures: Sequence[WorkerFailureError],
    details: Mapping[str, Any],
) -> WorkerFailuresError:
    return cls(message, failures, **details)


def combine(failures: Sequence[WorkerFailureError]) -> WorkerFailureError:
    """One failure as it is, several as one error that is also an exception group."""
    if len(failures) == 1:
        return failures[0]
    who = ", ".join("?" if f.rank is None else str(f.rank) for f in failures[:8])
    more = ", …" if len(failures) > 8 else ""
    group, method = failures[0].group_name, failures[0].method
    first = failures[0].message
    message = f"{len(failures)} workers of {group!r} failed in {method!r} (ranks {who}{more}), first {first}"
    return WorkerFailuresError(message, failures, pending=failures[0].pending)
