"""How much memory workers had at most in each phase; pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from raycrew.worker_groups._group.phases.occupancy import Occupancy
from raycrew.worker_groups._health import ResourceUsage

#: What ranks of members use, by member and rank.
Look = Mapping[str, Mapping[int, ResourceUsage]]


@dataclass(frozen=True, slots=True)
class HighWater:
    """Most memory that was seen.

    Attributes:
        host_bytes: Private memory of workers' processes and of all that they have started; None where it was
            not seen.
        device_bytes: What torch has reserved on devices; None where there is none, or it was not seen.
    """

    host_bytes: int | None = None
    device_bytes: int | None = None

    @classmethod
    def of(cls, *used: ResourceUsage) -> Self:
        """What several use together."""
        host = [one.private_bytes + (one.started_bytes or 0) for one in used if one.private_bytes is not None]
        device = [one.device_bytes for one in used if one.device_bytes is not None]
        return cls(sum(host) if host else None, sum(device) if device else None)

    def or_more(self, other: Self) -> Self:
        """The higher one of each."""
        host, device = _most(self.host_bytes, other.host_bytes), _most(self.device_bytes, other.device_bytes)
        return replace(self, host_bytes=host, device_bytes=device)

    def __str__(self) -> str:
        host = [] if self.host_bytes is None else [f"{self.host_bytes / 1e6:.1f} MB"]
        device = [] if self.device_bytes is None else [f"{self.device_bytes / 1e6:.1f} MB on devices"]
        return ", ".join(host + device) or "not seen"


def _most(one: int | None, other: int | None) -> int | None:
    known = [size for size in (one, other) if size is not None]
    return max(known) if known else None


@dataclass(frozen=True, slots=True)
class PhaseUse:
    """A phase: all turns of a member, or all changes to it.

    Attributes:
        times: How often it was.
        seconds: How long in all.
        together: Most memory of all ranks of all members at the same moment.
        ranks: Most memory of each rank, by member and rank.
    """

    times: int = 0
    seconds: float = 0.0
    together: HighWater = HighWater()
    ranks: Mapping[str, Mapping[int, HighWater]] = field(default_factory=dict)

    def begun(self) -> Self:
        """It is once more."""
        return replace(self, times=self.times + 1)

    def gone_on(self, seconds: float) -> Self:
        """It has taken that much longer."""
        return replace(self, seconds=self.seconds + seconds)

    def seen(self, look: Look) -> Self:
        """With a look at what all ranks use now."""
        together = HighWater.of(*(use for ranks in look.values() for use in ranks.values()))
        ranks = {name: dict(marks) for name, marks in self.ranks.items()}
        for name, used in look.items():
            known = ranks.setdefault(name, {})
            for rank, use in used.items():
                known[rank] = known.get(rank, HighWater()).or_more(HighWater.of(use))
        return replace(self, together=self.together.or_more(together), ranks=ranks)

    def lines(self, phase: str) -> list[str]:
        """It in words: in all, and each member's ranks, as far as they were seen."""
        often = "once" if self.times == 1 else f"{self.times} times"
        together = "memory not seen" if self.together == HighWater() else f"together at most {self.together}"
        told = [f"{phase}: {often}, {self.seconds:.2f} s; {together}"]
        for name, marks in self.ranks.items():
            seen = [f"rank {rank} {mark}" for rank, mark in marks.items() if mark != HighWater()]
            told += [f"  {name}: {'; '.join(seen)}"] if seen else []
        return told


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """What became of the turns so far.

    Attributes:
        states: Each member: "absent", "asleep", "awake" or "unsure".
        phases: By name: the turns of a member as itself; the changes to it, in which the others are put to
            sleep and it is woken, as "to" and its name.
    """

    states: Mapping[str, str]
    phases: Mapping[str, PhaseUse]

    @classmethod
    def of(cls, occupancy: Occupancy, phases: Mapping[str, PhaseUse]) -> Self:
        """What is so now."""
        return cls(dict(occupancy.states), dict(phases))

    def __str__(self) -> str:
        states = ", ".join(f"{name} is {state}" for name, state in self.states.items())
        return "\n".join([states, *(line for phase, use in self.phases.items() for line in use.lines(phase))])
