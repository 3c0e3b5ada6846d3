"""Turns: one at a time, in the order in which they were asked for."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from raycrew.tensor_transport._bytes import remake_in_child
from raycrew.tensor_transport.errors import TransportError, TransportTimeoutError

_SLICE_S = 0.1


@dataclass(eq=False)
class Turn:
    """Somebody's turn, or their place behind others.

    Attributes:
        threads: Those that it waits for.
    """

    threads: set[int] = field(default_factory=lambda: {threading.get_ident()})

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Within, this thread works for whoever has the turn and waits for it: one of its own never comes."""
        thread = threading.get_ident()
        self.threads.add(thread)
        try:
            yield
        finally:
            self.threads.discard(thread)


class Turns:
    """Gives turns.

    Args:
        of: What takes them, and over what, for errors.
    """

    def __init__(self, of: str) -> None:
        self._of = of
        self._changed = threading.Condition()
        self._tickets: deque[Turn] = deque()
        """Of who has its turn, and of those that wait behind."""
        remake_in_child(self)

    def after_fork(self) -> None:
        """In a forked child it is nobody's turn: the threads are its parent's."""
        self._changed, self._tickets = threading.Condition(), deque()

    @contextmanager
    def turn(self, timeout_s: float | None, check: Callable[[], object] | None = None) -> Iterator[Turn]:
        """Within, it is the turn of who asks.

        Args:
            timeout_s: How long it is waited for.
            check: Called now and then while it is; what it raises ends the wait.

        Raises:
            TransportTimeoutError: It did not come in time.
            TransportError: This thread has its turn already, or works for who has, and would wait for itself.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        ticket = Turn()
        try:
            with self._changed:
                self._refuse_own(ticket)
                self._tickets.append(ticket)
            while not self._has_come(ticket, deadline):
                if check is not None:
                    check()
                if deadline is not None and time.monotonic() >= deadline:
                    raise TransportTimeoutError(f"another {self._of}, and did not end within {timeout_s:g} s")
            yield ticket
        finally:
            with self._changed:
                if ticket in self._tickets:
                    self._tickets.remove(ticket)
                self._changed.notify_all()

    def _refuse_own(self, ticket: Turn) -> None:
        if self._tickets and self._tickets[0].threads & ticket.threads:
            raise TransportError(
                f"another {self._of} in this very thread, or waits for it, and would never end"
            )

    def _has_come(self, ticket: Turn, deadline: float | None) -> bool:
        left = _SLICE_S if deadline is None else min(_SLICE_S, max(0.0, deadline - time.monotonic()))
        with self._changed:
            return self._changed.wait_for(lambda: self._tickets[0] is ticket, left)
