"""What became of one item, and the errors that say so."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from raycrew.worker_groups.errors import WorkerGroupError

R = TypeVar("R")


class FunctionLoadError(WorkerGroupError):
    """The function can't be loaded in the processes that are to run it; the message holds the traceback."""


class ItemError(WorkerGroupError):
    """One item of a fan-out failed; `__cause__` is what the function raised, where it raised.

    Attributes:
        index: Position of the item in the input.
        attempts: How often it was tried.
        reason: What happened, in words.
    """

    def __init__(self, index: int, reason: str, attempts: int = 1) -> None:
        tries = "" if attempts == 1 else f" after {attempts} attempts"
        super().__init__(f"item {index} failed{tries}: {reason}")
        self.index = index
        self.reason = reason
        self.attempts = attempts

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.index, self.reason, self.attempts), self.__dict__


class ItemTimeoutError(ItemError, TimeoutError):
    """One item ran past `timeout_s`; it and every process it had started were killed."""


class ItemCrashedError(ItemError):
    """One item ended the process it ran in, or was lost with its node too often."""


class FanOutError(WorkerGroupError, ExceptionGroup[ItemError]):
    """Some items failed; all the others have run.

    Attributes:
        results: What the other items returned, by index.
    """

    results: dict[int, Any]

    def __new__(cls, failures: Sequence[ItemError], results: dict[int, Any]) -> Self:
        """ExceptionGroup takes its parts here."""
        total = len(failures) + len(results)
        message = f"{len(failures)} of {total} items failed; first: {failures[0]}"
        return ExceptionGroup.__new__(cls, message, failures)

    def __init__(self, _: Sequence[ItemError], results: dict[int, Any]) -> None:
        self.results = results

    def derive(self, failures: Sequence[ItemError]) -> "FanOutError":  # type: ignore[override]
        """The same error with some of its parts, as `except*` needs it."""
        return FanOutError(failures, self.results)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.exceptions, self.results), self.__dict__


@dataclass(frozen=True, slots=True)
class ItemOutcome(Generic[R]):
    """How one item ended.

    Attributes:
        index: Position of the item in the input.
        value: What the function returned; None if it failed.
        error: Why it failed; None if it returned.
        attempts: How often it was tried.
        seconds: How long the last attempt ran, where known.
    """

    index: int
    value: R | None = None
    error: ItemError | None = None
    attempts: int = 1
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.error is None

    def result(self) -> R:
        """The value, or the error raised."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]
