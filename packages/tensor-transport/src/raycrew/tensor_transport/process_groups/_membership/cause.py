"""Why a group can't be used any more, as its members tell each other; the first to say so is believed."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self

from raycrew.tensor_transport.errors import (
    GroupError,
    GroupTimeoutError,
    PeerLostError,
    StaleGenerationError,
)
from raycrew.tensor_transport.process_groups._membership.invitation import Invitation

_ERRORS: dict[str, type[GroupError]] = {
    "over": StaleGenerationError,
    "lost": PeerLostError,
    "closed": PeerLostError,
    "late": GroupTimeoutError,
    "failed": GroupError,
}


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a generation ended.

    Attributes:
        kind: "over" (there is a later one), "lost" (members died), "closed" (one left), "late" (members did
            not come in time) or "failed" (one could not go on).
        message: What happened.
        members: Whom it is about.
    """

    kind: str
    message: str
    members: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: BaseException, member: str) -> Self:
        """What one member tells the others of an error of its own."""
        if isinstance(error, GroupError):
            kinds = (kind for kind, cls_ in _ERRORS.items() if type(error) is cls_)
            return cls(next(kinds, "failed"), str(error), error.members)
        return cls("failed", f"{member} could not go on: {type(error).__name__}: {error}", (member,))

    def encode(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        """Back from `encode`."""
        found = json.loads(text)
        return cls(found["kind"], found["message"], tuple(found["members"]))

    def error(self, invitation: Invitation) -> GroupError:
        """As what is raised in a member."""
        return group_error(_ERRORS[self.kind], invitation, self.message, self.members)


def group_error(
    kind: type[GroupError], invitation: Invitation, message: str, members: Sequence[str] = ()
) -> GroupError:
    """An error of one member's group."""
    return kind(message, group=invitation.group, generation=invitation.generation, members=members)
