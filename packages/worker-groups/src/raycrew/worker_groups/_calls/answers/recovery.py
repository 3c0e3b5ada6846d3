"""What becomes of a call whose worker died: its group may be restarted, and the call sent again."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from raycrew.cluster_core import Session
from raycrew.worker_groups.errors import WorkerFailureError, WorkerGroupClosedError

_SLICE_S = 0.1


class Recovery:
    """Of one call.

    Args:
        restart: Told of the failure; says whether the group is whole again.
        send: Sends the call again and gives its future, for a method that may run twice; else None.
        seen: Told that a worker of the call is lost, where nobody has taken its results.
        in_passing: As `restart`, but does not wait where the group goes on without its worker; for calls of
            which the sender sees to a loss itself.
    """

    def __init__(
        self,
        restart: Callable[[WorkerFailureError], bool],
        send: Callable[[], Any] | None = None,
        seen: Callable[[], object] | None = None,
        in_passing: Callable[[WorkerFailureError], bool] | None = None,
    ) -> None:
        self._restart, self._send, self._seen = restart, send, seen
        self._in_passing = in_passing or restart
        self._lock = threading.Lock()

    def handed_over(self) -> "Recovery":
        """That of a call which the sender sends again itself, to another worker."""
        return Recovery(self._in_passing, None, self._seen)

    @property
    def sends_again(self) -> bool:
        """Whether the call is sent again once its group is whole."""
        return self._send is not None

    @property
    def is_told_of_losses(self) -> bool:
        """Whether anybody is to be told that a worker of the call is lost."""
        return self._seen is not None

    def note_loss(self) -> None:
        """Tell that a worker of the call is lost; restarts nothing."""
        if self._seen is not None:
            self._seen()

    def after(self, error: WorkerFailureError, is_present: Callable[[], bool]) -> Any:
        """Have the group restarted; gives the future of the call that was sent again, or None.

        Args:
            error: What became of it.
            is_present: Whether that is of the call as it was sent last, and not before another thread's turn.
        """
        with self._turn():
            if not is_present():
                return None
            if not self._restart(error):
                return None
            if self._send is None:
                error.add_note(
                    "its group was restarted; this call is not declared idempotent, and was not sent again"
                )
                return None
            try:
                return self._send()
            except WorkerGroupClosedError as closed:
                error.add_note(f"its group was restarted; this call was not sent again: {closed}")
                return None

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One thread at a time; another one's turn is waited for until what this thread does is given up."""
        while not self._lock.acquire(timeout=_SLICE_S):
            Session.check_wanted()
        try:
            yield
        finally:
            self._lock.release()
