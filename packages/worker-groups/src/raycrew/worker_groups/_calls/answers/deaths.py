"""What is told of a worker that has died: whether before or during a call, and in which."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raycrew.worker_groups._health import Seen, last_seen
from raycrew.worker_groups._on_nodes import METHOD_BYTES
from raycrew.worker_groups._ray import is_death
from raycrew.worker_groups.sharding import WorkerFacts

_LOOK_S = 2.0  # for all nodes' watches together to tell what they have seen


@dataclass(frozen=True, slots=True)
class Death:
    """That a worker was seen to have died.

    Attributes:
        noted: When this process noted it, by its monotonic clock.
        methods: Names of the methods that it was in; None where nobody knows.
    """

    noted: float
    methods: tuple[str, ...] | None

    def told_by(self, method: str, sent: float | None) -> str:
        """The death as a call's failure tells it.

        Args:
            method: What was called.
            sent: When, by the same clock; None if that is not known.
        """
        before = sent is not None and self.noted <= sent
        already = f"was dead already when {method} was called"
        if self.methods is None:
            return already if before else f"was dead when {method} was called, or died during {method}"
        if before:
            return f"{already}: it {self._where()}"
        if method[:METHOD_BYTES] in self.methods:
            return f"died during {method}"
        return f"{self._where()}, before it began {method}"

    def _where(self) -> str:
        return f"died during {', '.join(self.methods)}" if self.methods else "died while it was in no call"


def note_death(deaths: list[Death], seen: Seen | None) -> Death:
    """The first note of a worker's death, made now if there is none."""
    if not deaths:
        methods = None
        if seen is not None and seen.is_told:  # of what is still ending, too
            methods = tuple(call.method for call in seen.calls)
        deaths.append(Death(time.monotonic(), methods))
    return deaths[0]


def sights_of_dead(
    errors: Mapping[int, BaseException], facts: Mapping[int, WorkerFacts | None]
) -> dict[int, Seen]:
    """What watches have seen of those workers whose errors say that they have died; asked once for all."""
    died = {key: place for key, error in errors.items() if is_death(error) and (place := facts.get(key))}
    return last_seen(died, _LOOK_S) if died else {}


def over_limit(facts: WorkerFacts | None, seen: Seen | None) -> dict[str, Any]:
    """For which private memory a worker was ended by its node's watch, as attributes of the error."""
    measured = None if seen is None else seen.ended_at_bytes
    if facts is None or not measured:
        return {}
    return {"limit_bytes": facts.memory_limit_bytes, "measured_bytes": measured}
