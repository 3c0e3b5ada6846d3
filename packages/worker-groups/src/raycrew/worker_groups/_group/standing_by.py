"""What a group on Ray tells of those that stand by for its ranks."""

from dataclasses import replace

from raycrew.worker_groups._group.actors import Actors
from raycrew.worker_groups._group.base import WorkerGroup
from raycrew.worker_groups._group.life import CopiedLifecycle
from raycrew.worker_groups._group.reserve import Spare
from raycrew.worker_groups._health import Subjects, Workers, WorkerStatus, checked_patience
from raycrew.worker_groups._start import Layout


class StandingBy(WorkerGroup):
    """A group on Ray, as far as others than its ranks belong to it."""

    _crew: Actors

    @property
    def spares(self) -> list[Spare]:
        """The bundles that are kept for ranks that are lost, and who stands by on them; see `standby`.

        Raises:
            WorkerGroupError: This is a copy of the group.
        """
        self._life.check_owner("spares")
        return self._crew.reserve.spares

    def get_standby_status(self, timeout: float = 1.0) -> dict[int, WorkerStatus]:
        """What each worker that stands by is up to, by its bundle, as `get_worker_status` tells of ranks.

        Those that are found dead stand by no more, and somebody else is prepared in the background.

        Args:
            timeout: How long their nodes, and they themselves, may take to answer.

        Raises:
            TypeError: `timeout` is no number.
            ValueError: It is `nan`, or below zero.
            WorkerGroupClosedError: The group was shut down.
            WorkerGroupError: This is a copy of the group.
        """
        timeout = checked_patience(timeout)
        self._life.check_owner("get_standby_status")
        self._open()
        reserve = self._crew.reserve
        standbys = reserve.standbys
        workers = Workers([one.facts for one in standbys], [one.handle for one in standbys])
        found = self._statuses(workers, timeout)[1] if standbys else {}
        if dead := [standbys[position] for position, status in found.items() if status == "dead"]:
            reserve.part_with(dead)
            self._crew.publish()
            if self._life.state == "open":  # else who changes the group does
                self._replenish()
        return {standbys[position].place.bundle.index: status for position, status in found.items()}

    def _replenish(self) -> None:
        """Have somebody stand by wherever nobody does any more, in the background."""
        self._crew.reserve.replenish(Layout(self._spec, self._claim, self._started))

    def _to_diagnose(self) -> Subjects:
        subjects = super()._to_diagnose()
        if isinstance(self._life, CopiedLifecycle):
            return subjects
        known = [(one.place.bundle.index, one.facts) for one in self._crew.reserve.standbys]
        return replace(subjects, standbys=known)
