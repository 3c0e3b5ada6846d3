"""Room for new samples, and who may have it first. Pure."""

from raycrew.worker_groups.rollouts.samples._options import QueueOptions
from raycrew.worker_groups.rollouts.samples._states import Ledger
from raycrew.worker_groups.rollouts.samples._storage import Rows

#: So long somebody is waited for who stands in the line and does not try again, having been killed, say.
PLACE_S = 2.0


class Room:
    """What may come, in the order in which it was brought: nobody who brings less passes by who brings more.

    Only where somebody waits for samples, of whom there are too few, may whoever has room pass, as those who
    wait in line could wait for that for ever.

    Args:
        options: The queue's.
        ledger: What it holds.
        rows: What keeps the rows.

    Attributes:
        is_short: Whether somebody has asked for more samples than there were, and nobody was given any since.
    """

    def __init__(self, options: QueueOptions, ledger: Ledger, rows: Rows) -> None:
        self._most, self._ledger, self._rows = options.max_samples, ledger, rows
        self._line: dict[str, float] = {}  # in order, and until when a place is kept
        self.is_short = False

    def takes(self, n: int, size_bytes: int, ticket: str, now: float) -> bool:
        """Whether so many samples may come now; if not, whoever brings them stands in the line from now on.

        Args:
            n: How many.
            size_bytes: Of their rows.
            ticket: Who brings them, each time that it is tried.
            now: By the monotonic clock.
        """
        if self._is_there(n, size_bytes) and (self.is_short or self._is_first(ticket, now)):
            self._line.pop(ticket, None)
            return True
        self._line[ticket] = now + PLACE_S  # one who stands there already stays where they are
        return False

    def leave(self, ticket: str | None) -> bool:
        """Stand in the line no longer; whether somebody did."""
        return self._line.pop(ticket, None) is not None if ticket else False

    def n_before(self, ticket: str) -> int:
        """How many stand in the line before somebody."""
        line = list(self._line)
        return line.index(ticket) if ticket in line else len(line)

    def _is_there(self, n: int, size_bytes: int) -> bool:
        held = len(self._ledger.samples)
        return (self._most is None or held + n <= self._most) and self._rows.has_room(size_bytes)

    def _is_first(self, ticket: str, now: float) -> bool:
        for other, until in list(self._line.items()):
            if other == ticket:
                return True
            if until > now:
                return False
            del self._line[other]
        return True
