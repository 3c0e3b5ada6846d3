"""Who the members of a group are in one generation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raycrew.worker_groups.sharding import NamedSharding, RankInfo, WorkerFacts


@dataclass(frozen=True, slots=True)
class Members:
    """The members of a group in one generation, in rank order.

    Attributes:
        handles: Their actors.
        ranks: Where each rank is.
        facts: What is known of their processes.
        tied_groups: Ranks of each tied group, leader first.
        sharding: Named axes over the ranks.
    """

    handles: Sequence[Any]
    ranks: Sequence[RankInfo]
    facts: Sequence[WorkerFacts]
    tied_groups: Sequence[Sequence[int]]
    sharding: NamedSharding | None = None

    @property
    def generation(self) -> int:
        """Which generation this is."""
        return self.ranks[0].generation
