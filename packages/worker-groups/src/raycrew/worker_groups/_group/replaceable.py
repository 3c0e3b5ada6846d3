"""A group on Ray as its supervision sees it."""

from collections.abc import Callable, Collection

from raycrew.worker_groups._group.renewal import RenewedGroup
from raycrew.worker_groups._ray import ActorState, actor_states

_STATUS_S = 1.0


class Replaceable:
    """A group as its supervision sees it."""

    def __init__(self, group: RenewedGroup) -> None:
        self._group = group

    def replace_dead(self, before: Callable[[], object]) -> list[int]:
        """Replace dead workers as `restart_failed_workers` does, and to the end if nobody waits any more."""
        group = self._group
        return group._life.restart(lambda: group._replace_dead(before), apart=True)  # noqa: SLF001

    @property
    def is_torn(self) -> bool:
        """Whether the group's last new generation failed."""
        return self._group._is_torn  # noqa: SLF001

    def is_present(self, rank: int | None, pid: int | None) -> bool:
        """Whether a process is the one that a rank has now."""
        facts = self._group._started.facts  # noqa: SLF001
        return rank is not None and rank < len(facts) and facts[rank].pid == pid

    def goes_on_without(self, ranks: Collection[int | None]) -> bool:
        """Whether it can be used while these ranks are replaced."""
        least = self._group._spec.options.min_workers  # noqa: SLF001
        there = set(range(self._group.world_size)) - set(self._group.absent_ranks)
        return least is not None and len(there.difference(ranks)) >= least

    def is_without(self, ranks: Collection[int | None]) -> bool:
        """Whether it is used without these ranks now."""
        return set(self._group.absent_ranks).issuperset(ranks)

    def status(self, rank: int) -> ActorState:
        """What a rank's worker is up to."""
        self._group._open()  # noqa: SLF001
        handles = self._group._started.handles[rank : rank + 1]  # noqa: SLF001
        return actor_states(handles, _STATUS_S).get(0, "dead")
