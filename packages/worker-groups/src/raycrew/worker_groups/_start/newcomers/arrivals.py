"""Workers that come to bundles which their group did not have before, or where somebody stands by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from raycrew.worker_groups._start.describing import describe_worker
from raycrew.worker_groups._start.layout import Place
from raycrew.worker_groups._start.spec import interpreter_for
from raycrew.worker_groups._start.startup import Handle, Launch, Started
from raycrew.worker_groups._worker import Configured, WorkerOptions
from raycrew.worker_groups.sharding import WorkerFacts

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Standby:
    """A worker that has no rank yet, on a bundle of its own.

    Attributes:
        place: The bundle.
        handle: Its actor.
        name: The actor's name.
        facts: What is known of its process.
        configured: What its class's `configure_worker` said of a worker on this bundle.
        options: What it was started with, and what it is to be told.
    """

    place: Place
    handle: Handle
    name: str
    facts: WorkerFacts
    configured: Configured
    options: WorkerOptions = field(repr=False)


class Arriving(Launch):
    """A start of workers at some positions of a group that stands."""

    def prepared(self, started: Started, positions: Sequence[int]) -> Started:
        """The same workers, and what is told to those that come to these positions, on their bundles.

        Raises:
            WorkerFailureError: The class can't be described in its environment.
            TypeError: Arguments don't fit `__init__`.
            EnvironmentProviderError: There is no interpreter for the workers.
        """
        python = interpreter_for(self.spec.options.environments, self.spec.builder.fqn, self.spec.cluster)
        asked = (self.spec, self.claim, self.source, python, self.deadline, self.go_on, positions)
        own = dict(zip(positions, describe_worker(*asked).configured, strict=True))
        info = replace(started.info, configured=tuple(_changed(started.info.configured, own)))
        options = {position: self._options(info, position, python) for position in positions}
        self._check_init(info, list(options.values()))
        return replace(started, info=info, options=_changed(started.options, options))

    def met(self, started: Started, arrivals: Mapping[int, Standby | None]) -> Started:
        """The same as `prepared` for workers on bundles where some stand by, who are taken."""
        if alone := [position for position, standby in arrivals.items() if standby is None]:
            started = self.prepared(started, alone)
        met = {position: standby for position, standby in arrivals.items() if standby is not None}
        for position, standby in met.items():
            self.handles[position], self.names[position] = standby.handle, standby.name
            self.located[position] = standby.facts
        configured = {position: standby.configured for position, standby in met.items()}
        options = {position: standby.options for position, standby in met.items()}
        info = replace(started.info, configured=tuple(_changed(started.info.configured, configured)))
        return replace(started, info=info, options=_changed(started.options, options))


def _changed(values: Sequence[T], others: Mapping[int, T]) -> list[T]:
    """The same values but for some positions, perhaps further ones at the end."""
    known = {**dict(enumerate(values)), **others}
    return [known[position] for position in range(len(known))]
