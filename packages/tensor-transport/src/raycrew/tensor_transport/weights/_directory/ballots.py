"""Who decides about a version that was made for some receivers: each of them once, and who asked for it."""

from collections.abc import Iterable
from typing import Any

from raycrew.tensor_transport.errors import UpdateAbortedError, WeightUpdateError


class RecipientVersion(int):
    """A version's number as one recipient is told it, with the ballot that makes it a voter.

    Whatever process of the recipient has it last counts: a restarted one in place of the one before.
    """

    ballot: str
    is_over: bool

    def __new__(cls, number: int, ballot: str, is_over: bool = False) -> "RecipientVersion":
        """A number and a ballot, and whether the version was given up."""
        made = super().__new__(cls, number)
        made.ballot, made.is_over = ballot, is_over
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return RecipientVersion, (int(self), self.ballot, self.is_over)

    @property
    def given_up(self) -> "RecipientVersion":
        """The same, for a recipient that prepared it to forget it."""
        return RecipientVersion(int(self), self.ballot, is_over=True)


class Ballots:
    """The ballots of a version.

    Args:
        ballots: One for each recipient.
        key: What shows that somebody is who asked for the version; "" where nobody has to confirm it.

    Attributes:
        is_confirmed: Whether who asked for the version knows that what it wanted was published as it.
    """

    def __init__(self, ballots: Iterable[str], key: str) -> None:
        self.is_confirmed = not key
        self._key = key
        self._shown = dict.fromkeys(ballots, "")
        self._replaced: set[str] = set()

    @property
    def receivers(self) -> list[str]:
        """Who showed each ballot last; "" where nobody did."""
        return list(self._shown.values())

    def admit(self, number: int, receiver: str, ballot: str) -> str:
        """Let a receiver count for a ballot; who did before, if it was another one.

        Raises:
            WeightUpdateError: There is no such ballot, or the receiver has another one.
            UpdateAbortedError: Another one took its place: what it asked may still wait when it is dead.
        """
        if receiver in self._replaced:
            raise UpdateAbortedError(f"version {number}: another receiver took the place of {receiver}")
        before = self._shown.get(ballot)
        if before is None:
            raise WeightUpdateError(
                f"version {number} is not decided yet, and receiver {receiver} is not one that decides: hand "
                "on to WeightReceiver what sync_weights() gave, as it is; others pull() what is committed"
            )
        if any(shown == receiver for other, shown in self._shown.items() if other != ballot):
            raise WeightUpdateError(f"version {number}: two receivers are called {receiver}")
        self._shown[ballot] = receiver
        if before in ("", receiver):
            return ""
        self._replaced.add(before)
        return before

    def confirm(self, number: int, key: str) -> None:
        """What was published is what was asked for.

        Raises:
            WeightUpdateError: It was somebody else that asked.
        """
        if key != self._key:
            raise WeightUpdateError(f"version {number} was asked for by somebody else")
        self.is_confirmed = True
