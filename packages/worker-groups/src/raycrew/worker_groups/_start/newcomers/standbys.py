"""Workers that stand by: shells on bundles of their own, with modules imported, that wait for a rank."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from raycrew.worker_groups._health import Ended, WorkerRecord
from raycrew.worker_groups._ray import while_connected
from raycrew.worker_groups._start.layout import Layout, Place
from raycrew.worker_groups._start.newcomers.arrivals import Arriving, Standby
from raycrew.worker_groups._start.record import place_of
from raycrew.worker_groups._start.report import starting
from raycrew.worker_groups._start.startup import Started


def park(
    layout: Layout,
    places: Mapping[int, Place],
    on_end: Callable[[Ended], None],
    go_on: Callable[[], object],
) -> list[Standby]:
    """Start workers that stand by, and wait until they have imported what they are to.

    Such a process is told neither a rank nor variables nor secrets, and nothing of the user's class.

    Args:
        layout: The group.
        places: Where, each under a position whose worker would be started there just so.
        on_end: Told what became of them, when their start fails.
        go_on: Called now and then; what it raises ends them.

    Raises:
        WorkerFailureError: One failed or was late, or can't import a module; all of them have been ended.
    """
    spec, claim, started = layout.moved(places)
    spec = replace(spec, options=replace(spec.options, progress=False))
    with starting(spec, len(places)) as progress:
        return _Parking(spec, claim, progress, list(places), on_end, go_on).run_parked(started, places)


def record_of_standby(standby: Standby) -> WorkerRecord:
    """What a group tells everybody of a worker that stands by."""
    facts, bundle = standby.facts, standby.place.bundle
    return WorkerRecord(
        rank=-1,
        actor=standby.name,
        node_id=facts.node_id,
        node_address=facts.node_address,
        pid=facts.pid,
        started=facts.started,
        bundle_index=bundle.index,
        device=":".join(str(part) for part in (facts.device_kind, facts.device_index) if part is not None),
        **place_of(standby.options.actor),
    )


class _Parking(Arriving):
    """A start of workers without ranks, step by step."""

    def run_parked(self, started: Started, places: Mapping[int, Place]) -> list[Standby]:
        """Start them."""
        started = self.prepared(started, self.positions)
        names = {p: f"{self.spec.name}-standby-{place.bundle.index}" for p, place in places.items()}
        self.aliases = [names.get(p, alias) for p, alias in enumerate(self.aliases)]
        try:
            self._create(started.info, started.options)
            facts = self._locate()
            self._preload()
            self.claim.learn({p: d for p in facts if (d := facts[p].device_index) is not None})
        except BaseException:
            self._end()
            raise
        return [
            Standby(
                places[position],
                self.handles[position],
                self.names[position],
                facts[position],
                started.info.configured[position],
                started.options[position],
            )
            for position in self.positions
        ]

    def _preload(self) -> None:
        handles: list[Any] = [self.handles[position] for position in self.positions]
        modules = tuple(self.spec.options.preload)
        with while_connected(self.go_on):
            asked = [handle._raycrew_preload.remote(modules) for handle in handles]  # noqa: SLF001
        places = [self._whereabouts(position) for position in self.positions]
        places = [
            replace(place, facts=self.located[p]) for place, p in zip(places, self.positions, strict=True)
        ]
        self._raise_failed(self._settle(asked), places, "preload")
