"""What dispatch knows of a group, and what it makes of a call: who gets what."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from raycrew.worker_groups._worker import ClassInfo, Join, MethodInfo
from raycrew.worker_groups.errors import GroupResizedError, UnknownMethodError
from raycrew.worker_groups.sharding import NamedSharding


@dataclass(frozen=True, slots=True)
class Send:
    """One call to one rank; objects that several of these share are the same object."""

    rank: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One call on a group.

    Attributes:
        method: The method.
        sends: Who gets what; in rank order, unless a caller has named ranks in another one.
        return_from: Ranks whose results the caller wants, in the order of the results.
        respect_tied_workers: Whether that is one rank per tied group.
        join: Makes one value of these results, where the method declares that.
        world_size: Number of ranks that the group had when this was made; 0 where that is of no matter.
        is_again: Whether it was sent before, and a worker died.
    """

    method: MethodInfo
    sends: tuple[Send, ...]
    return_from: tuple[int, ...]
    respect_tied_workers: bool = False
    join: Join | None = None
    world_size: int = 0
    is_again: bool = False

    def check_size(self, world_size: int, group_name: str) -> None:
        """Make sure that a group still has the ranks that this was made for: each, and all if it is for all.

        Raises:
            GroupResizedError: It has others by now.
        """
        made_for = self.world_size
        if made_for in (0, world_size) or not self.sends:
            return
        last = max(send.rank for send in self.sends)
        if last >= world_size or len(self.sends) == made_for:
            what = f"rank {last}" if len(self.sends) == 1 else f"{len(self.sends)} of {made_for} ranks"
            sent = "may have run; it is not sent again" if self.is_again else "nothing was sent: call again"
            workers = "1 worker" if world_size == 1 else f"{world_size} workers"
            raise GroupResizedError(
                f"{group_name!r} has {workers} by now; a call of {self.method.name} for {what} "
                f"was made before, and {sent}"
            )


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What dispatch needs to know of a group.

    Attributes:
        info: The worker class.
        world_size: Number of ranks.
        tied_groups: Ranks of each tied group, leader first.
        sharding: Named axes over the ranks, if there are any.
        absent: Ranks that are called by those alone who name them, as they are being replaced.
        known_calls: Method, number of positional and names of keyword arguments of calls that fitted.
    """

    info: ClassInfo
    world_size: int
    tied_groups: Sequence[Sequence[int]]
    sharding: NamedSharding | None = None
    absent: frozenset[int] = frozenset()
    known_calls: set[tuple[str, int, tuple[str, ...]]] = field(default_factory=set, compare=False, repr=False)

    def without_absent(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Those of some ranks that a call is sent to which is the same for all; all if none would be left."""
        return tuple(rank for rank in ranks if rank not in self.absent) or tuple(ranks)

    def method(self, name: str) -> MethodInfo:
        """A method of the worker class.

        Raises:
            UnknownMethodError: There is none of that name.
        """
        try:
            return self.info.methods[name]
        except KeyError:
            known = ", ".join(n for n in self.info.methods if not n.startswith("_"))
            raise UnknownMethodError(f"{self.info.fqn} has no method {name!r}; it has: {known}") from None

    def check_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Ranks of this group, each once; numpy's integers, too, and an array of them.

        Raises:
            ValueError: A rank is out of range or repeated, or there is none.
        """
        ranks = tuple(ranks)
        if not ranks:
            raise ValueError("no ranks were named")
        for rank in ranks:
            if isinstance(rank, bool) or not isinstance(rank, (int, Integral)):
                raise ValueError(f"rank {rank!r} is no integer from 0 to {self.world_size - 1}")
            if not 0 <= rank < self.world_size:
                raise ValueError(f"rank {rank} is outside 0 to {self.world_size - 1}")
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"ranks are repeated: {list(ranks)}")
        return tuple(map(int, ranks))

    def axes(self, names: Sequence[str], what: str) -> tuple[str, ...]:
        """Names of axes, checked.

        Raises:
            ValueError: The group has no named axes, or none of that name, or one is named twice.
        """
        if isinstance(names, str):
            raise TypeError(f"{what} is a sequence of axis names, as in [{names!r}]")
        if names and self.sharding is None:
            raise ValueError(f"{what}={list(names)} needs a group with sharding_annotations")
        for name in names:
            if self.sharding is not None:
                self.sharding.get_axis_index(name)
        if len(set(names)) != len(names):
            raise ValueError(f"{what} names an axis twice: {list(names)}")
        return tuple(names)
