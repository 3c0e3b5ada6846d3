"""What a process needs to know to join one generation of a group; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Backend = Literal["auto", "nccl", "gloo"]


def check_backend(backend: str) -> None:
    """Refuse a name that is none.

    Raises:
        ValueError: It is not one of the backends.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend is one of {', '.join(get_args(Backend))}, not {backend!r}")


@dataclass(frozen=True, slots=True)
class Invitation:
    """The place of one member in one generation of a group: small, and picklable.

    Attributes:
        group: Name of the group.
        generation: 1 for the first; each `GroupHost.open` makes another one.
        rank: The member's rank in the group.
        members: Names of all members, in rank order.
        address: Where the store of this generation listens.
        port: Its port, of this generation alone.
        backend: What the group was asked to use.
        token: What tells this generation from all others, whatever their names and ports.
    """

    group: str
    generation: int
    rank: int
    members: tuple[str, ...]
    address: str
    port: int
    backend: Backend
    token: str = field(repr=False)

    @property
    def member(self) -> str:
        """The member's name."""
        return self.members[self.rank]

    @property
    def label(self) -> str:
        """The group and its generation, for people."""
        return f"generation {self.generation} of group {self.group!r}"


def check_members(members: Sequence[str]) -> tuple[str, ...]:
    """The names of a group's members.

    Raises:
        TypeError: They are not names.
        ValueError: There is none, or one comes twice.
    """
    if isinstance(members, str) or not all(isinstance(name, str) for name in members):
        raise TypeError(f"members is a sequence of names, not {members!r}")
    if not members:
        raise ValueError("a group needs at least one member")
    if twice := sorted({name for name in members if members.count(name) > 1}):
        raise ValueError(f"each member has a name of its own; twice: {', '.join(twice)}")
    return tuple(members)


def member_names(peers: Mapping[str, Any]) -> tuple[str, ...]:
    """`{"trainer": group, "generator": group}` -> ("trainer/0", "trainer/1", "generator/0", …)."""
    return tuple(f"{role}/{rank}" for role, group in peers.items() for rank in ranks_of(group))


def ranks_of(group: Any) -> list[int]:
    """The ranks of a peer group, whose entries are numbers or have them."""
    return [int(getattr(entry, "rank", entry)) for entry in group.ranks]
