"""What is told of calls that fail or are late: which ranks, where they are, and what all ranks were at."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from raycrew.cluster_core import Session
from raycrew.worker_groups._calls.answers.failures import (
    Whereabouts,
    group_failure,
    group_failures,
    too_late,
)
from raycrew.worker_groups._calls.answers.waiting import Settled
from raycrew.worker_groups._ray import call_id, check_session
from raycrew.worker_groups.errors import ResultTimeoutError, WorkerFailureError, WorkerGroupError

E = TypeVar("E", bound=WorkerGroupError)


class Telling(list[Any]):
    """ObjectRefs of calls (or generators of them), and the errors that they end in."""

    method: str
    group_name: str
    _session: Session | None
    _places: dict[int, Whereabouts]
    _sent_at: float
    _diagnose: Callable[[WorkerGroupError, Hashable], object] | None

    def _check(self) -> None:
        check_session(self._session, f"{self.group_name}.{self.method}")

    def _own_id(self) -> bytes:
        return call_id(self[0])

    def _failed(self, settled: Settled) -> WorkerFailureError:
        """One error for the failures of some ranks."""
        self._check()  # else what failed is the connection
        elapsed = time.monotonic() - self._sent_at
        return self._told(group_failure(settled, self._places, self.group_name, self.method, elapsed))

    def _failed_each(self, errors: Mapping[int, Exception]) -> dict[int, WorkerFailureError]:
        """An error for each failure, by rank."""
        if not errors:
            return {}
        self._check()
        elapsed, settled = time.monotonic() - self._sent_at, Settled(errors=dict(errors))
        failed = group_failures(settled, self._places, self.group_name, self.method, elapsed)
        return {rank: self._told(error) for rank, error in failed.items()}

    def _timed_out(self, ranks: Sequence[int]) -> ResultTimeoutError:
        elapsed = time.monotonic() - self._sent_at
        return self._told(too_late(f"{self.group_name}.{self.method}", ranks, elapsed))

    def _told(self, error: E) -> E:
        """An error that says where its group's diagnosis lies, if that makes any; one of each kind a call."""
        if self._diagnose is not None:
            self._diagnose(error, (isinstance(error, ResultTimeoutError), self._own_id()))
        return error
