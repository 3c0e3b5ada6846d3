"""Whether a generation goes on, asked while something is waited for."""

import itertools
import time
from collections.abc import Collection, Sequence

from raycrew.tensor_transport.errors import GroupError, GroupTimeoutError, PeerLostError
from raycrew.tensor_transport.process_groups._membership.board import Board
from raycrew.tensor_transport.process_groups._membership.cause import Cause, group_error
from raycrew.tensor_transport.process_groups._membership.invitation import Invitation
from raycrew.tensor_transport.process_groups._membership.lifeline import Lifeline
from raycrew.tensor_transport.process_groups._membership.seat import Seat

_SETTLE_S = 1.0
_SETTLE_PAUSE_S = 0.05


class Watch:
    """Looks after one member's group: what the others said, and whether they are still there."""

    def __init__(
        self, board: Board, invitation: Invitation, seats: Sequence[Seat], lifeline: Lifeline
    ) -> None:
        self._board = board
        self._invitation = invitation
        self._seats = seats
        self._lifeline = lifeline
        self._turns = itertools.count()

    def look(self, suspects: Collection[int]) -> None:
        """Return if nothing is known against this generation; one of the suspects is asked at a time.

        Raises:
            GroupError: Somebody said why it ended, or a suspect is gone.
        """
        self._lifeline.drain()
        self._raise_cause()
        others = [rank for rank in suspects if rank != self._invitation.rank]
        if others:
            self._raise_lost([others[next(self._turns) % len(others)]])

    def explain(self, error: Exception) -> GroupError:
        """Why an operation failed: what another member said, else who is gone, else what is known."""
        end = time.monotonic() + _SETTLE_S
        while True:
            try:
                self._raise_cause()
                self._raise_lost(range(len(self._seats)))
            except GroupError as found:
                return found
            if time.monotonic() >= end:
                break
            time.sleep(_SETTLE_PAUSE_S)
        late = any(word in str(error).lower() for word in ("timed out", "timeout"))
        what = "a member stands still" if late else "a connection broke"
        message = (
            f"{self._invitation.label}: {what}, and every process is there, as far as can be seen from here "
            f"({error})"
        )
        return group_error(GroupTimeoutError if late else GroupError, self._invitation, message)

    def blame(self, error: BaseException) -> GroupError:
        """Tell the others of an error of this member; the one that all of them see."""
        return self._board.blame(Cause.of(error, self._invitation.member)).error(self._invitation)

    def _raise_cause(self) -> None:
        if (cause := self._board.cause()) is not None:
            raise cause.error(self._invitation)

    def _raise_lost(self, ranks: Collection[int]) -> None:
        own = self._invitation.rank
        lost = [self._seats[rank] for rank in ranks if rank != own and self._seats[rank].is_gone()]
        if lost:
            message = f"{self._invitation.label} lost {', '.join(map(str, lost))}: gone from its machine"
            members = [seat.member for seat in lost]
            error = group_error(PeerLostError, self._invitation, message, members)
            raise self.blame(error)
