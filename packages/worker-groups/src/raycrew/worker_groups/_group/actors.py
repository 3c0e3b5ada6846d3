"""The workers of a group on Ray without the group, so that they can be ended when it is gone."""

from dataclasses import dataclass, field, replace
from threading import Lock

from raycrew.cluster_core import Claim, Session
from raycrew.worker_groups._group.handles import Directory
from raycrew.worker_groups._group.reserve import Reserve
from raycrew.worker_groups._health import Ended, GroupRecord, Publication, end_workers_of
from raycrew.worker_groups._start import Handle
from raycrew.worker_groups.sharding import WorkerFacts


@dataclass
class Actors:
    """The workers of a group on Ray, without the group.

    Attributes:
        name: Name of the group.
        session: The connection that they belong to.
        handles: In rank order.
        facts: What is known of their processes, in rank order.
        claim: Their bundles.
        directory: Says who they are now to those who have a handle of the group.
        publication: Says who they are to all who look at the cluster.
        strays: New workers of failed restarts that could not be ended, and removed ones that have not ended
            yet, by rank.
        reserve: Bundles and workers that wait for ranks that are lost.
    """

    name: str
    session: Session
    handles: list[Handle]
    facts: list[WorkerFacts]
    claim: Claim
    directory: Directory
    publication: Publication
    strays: list[Ended] = field(default_factory=list)
    reserve: Reserve = field(default_factory=Reserve)
    _told: GroupRecord | None = None
    _telling: Lock = field(default_factory=Lock, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.reserve.on_change = self.publish

    def publish(self, record: GroupRecord | None = None) -> None:
        """Tell all who look at the cluster who the workers are.

        Args:
            record: What is told from now on; None where only those that stand by are others.
        """
        with self._telling:
            self._told = record or self._told
            if self._told is not None:
                self.publication.publish(replace(self._told, standbys=self.reserve.records))

    def end(self, timeout_s: float, force: bool) -> Ended:
        """End them, by rank; they may have ended before."""
        handles, facts = dict(enumerate(self.handles)), dict(enumerate(self.facts))
        self.reserve.close()
        try:
            ended = end_workers_of(self.session, handles, facts, 0.0 if force else timeout_s)
            return ended.beside([*self.end_strays(), self.reserve.end(len(handles))])
        finally:
            if Session.current() == self.session:
                self.publication.end()
                self.directory.end()

    def end_strays(self) -> list[Ended]:
        """Try once more to end new workers of failed restarts; gives those that may still use bundles."""
        strays = [stray.once_more() for stray in self.strays]
        self.strays = [stray for stray in strays if stray.occupied]
        return self.strays
