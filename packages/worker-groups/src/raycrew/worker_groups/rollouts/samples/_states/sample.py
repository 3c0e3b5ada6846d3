"""A sample as the queue knows it, and for which use of it it is ready. Pure."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from raycrew.worker_groups.rollouts.samples._states.versions import Runs, oldest

#: Stands among the columns of a sample that is no part of a rollout that goes on.
WHOLE = 1
ALL = -1
#: What the age of a prompt counts from, of which no version has made a token yet.
AGELESS = 1 << 62


@dataclass(eq=False, slots=True)
class Sample:
    """One sample.

    Attributes:
        id: Its number; samples are numbered as they come.
        mask: The columns that it has, a bit each, and `WHOLE`.
        tag: The version that its age counts from, or `AGELESS`.
        runs: Which version has made which tokens.
        rows: Its row of each column; None where it has none.
        born: When it came, by the monotonic clock.
        busy: The columns that somebody adds to it now; all where somebody has taken it.
        ready: The uses that it is ready for, a bit each.
        is_rescored: Whether it waits to be scored anew.
        scored_by: The oldest version that has scored a column of it since then.
        segment: Where it was written down.
        key: What it was put under, if anything.
    """

    id: int
    mask: int
    tag: int
    runs: Runs
    rows: list[Any]
    born: float = 0.0
    busy: int = 0
    ready: int = 0
    is_rescored: bool = False
    scored_by: int | None = None
    segment: int = 0
    key: str | None = None


class Use(NamedTuple):
    """What somebody wants samples for.

    Attributes:
        needs: The columns that a sample must have.
        adds: The columns that it must not have, as they are to be added; none where it is to be used up.
    """

    needs: int
    adds: int = 0

    @property
    def claims(self) -> int:
        """The columns that nobody else may be adding meanwhile."""
        return self.adds or ALL


GOES_ON = Use(0, WHOLE)
"""To go on with a rollout."""


def tag_of(mask: int, runs: Runs) -> int:
    """The version that the age of a sample counts from, before it is scored anew."""
    is_prompt = not mask & WHOLE and all(run.length == 0 for run in runs)
    return AGELESS if is_prompt else oldest(runs)


def is_ready(sample: Sample, use: Use) -> bool:
    """Whether a sample may be handed out for a use."""
    needs, adds = use
    mask = sample.mask
    return mask & needs == needs and not mask & adds and not sample.busy & (adds or ALL)


def may_become_ready(sample: Sample, use: Use) -> bool:
    """Whether a sample that is not ready may be so later on."""
    return not use.adds or not sample.mask & use.adds
