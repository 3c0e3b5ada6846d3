"""Who of several has the devices, and who is in the way of another; pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

from raycrew.worker_groups.errors import PhaseError

#: "absent": it has no workers. "unsure": a step of its has not ended well, so that it may have memory or not.
MemberState = Literal["absent", "asleep", "awake", "unsure"]


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Who is awake.

    A step is begun before it is done, and ended only if it went well: whatever comes between leaves an
    "unsure" member, which is in everybody else's way until it has been put to sleep.

    Attributes:
        states: By name, in the order in which they are put to sleep.
        holder: Who may take memory; all others are asleep or absent when it becomes so.
    """

    states: Mapping[str, MemberState]
    holder: str | None = None

    @classmethod
    def of(cls, names: Iterable[str]) -> Self:
        """Nobody is there yet."""
        return cls(dict.fromkeys(names, "absent"))

    def in_the_way_of(self, name: str) -> list[str]:
        """Who has to be put to sleep before another may be woken, in order."""
        return [
            other for other, state in self.states.items() if other != name and state in ("awake", "unsure")
        ]

    def has_to_wake(self, name: str) -> bool:
        """Whether it is not known to be awake."""
        return self.states[name] in ("asleep", "unsure")

    def falling_asleep(self, name: str) -> Self:
        """From now on it may take no memory; whether it still has some is not known."""
        holder = None if self.holder == name else self.holder
        return replace(self._with(name, "unsure"), holder=holder)

    def asleep(self, name: str) -> Self:
        """It has been put to sleep."""
        return self._with(name, "asleep")

    def taken_by(self, name: str) -> Self:
        """It may take memory.

        Raises:
            PhaseError: Somebody is in its way.
        """
        if others := self.in_the_way_of(name):
            raise PhaseError(f"{name!r} can't have the devices while {others} may be awake", name)
        return replace(self, holder=name)

    def joined(self, name: str) -> Self:
        """It has workers from now on, which came up awake.

        Raises:
            PhaseError: Another one may take memory, or nobody.
        """
        return self.waking(name).awake(name)

    def waking(self, name: str) -> Self:
        """It is being woken.

        Raises:
            PhaseError: Another one may take memory, or nobody.
        """
        if self.holder != name:
            raise PhaseError(f"{name!r} can't be woken: {self.holder!r} has the devices", name)
        return self._with(name, "unsure")

    def awake(self, name: str) -> Self:
        """It has been woken."""
        return self._with(name, "awake")

    def doubted(self, name: str) -> Self:
        """Some of its workers are others than those that were put to sleep or woken."""
        return self if self.states[name] == "absent" else self._with(name, "unsure")

    def without(self, name: str) -> Self:
        """It has no workers any more; within its turn it may start others."""
        return self._with(name, "absent")

    def _with(self, name: str, state: MemberState) -> Self:
        return replace(self, states={**self.states, name: state})
