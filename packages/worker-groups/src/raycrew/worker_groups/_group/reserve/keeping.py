"""Spare bundles and who stands by on them: prepared, taken, given back and ended."""

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from ray.exceptions import GetTimeoutError

from raycrew.cluster_core import Bundle, NodeLostError, Session
from raycrew.worker_groups._group.life import release_when_free
from raycrew.worker_groups._group.reserve.choosing import choose, templates
from raycrew.worker_groups._group.reserve.spare import Move, Spare
from raycrew.worker_groups._health import Ended, WorkerRecord, end_workers_of
from raycrew.worker_groups._ray import actor_states, check_session, living_nodes
from raycrew.worker_groups._start import JoinedClaim, Layout, Place, Standby, park, record_of_standby
from raycrew.worker_groups.errors import WorkerGroupClosedError

logger = logging.getLogger(__name__)

_ANSWER_S = 1.0  # for who stands by to say that it does
_UNWIND_S = 30.0  # for a preparation that is given up to end what it has started
_PAUSES_S = (5.0, 30.0, 120.0)  # before somebody is prepared once more


class Reserve:
    """Of one group; without the group, so that it can be ended when that is gone.

    Args:
        name: Name of the group.
        session: The connection that who stands by belongs to.
        places: The spare bundles.
        n_standbys: On how many of them somebody is to stand by.
    """

    def __init__(
        self,
        name: str = "",
        session: Session | None = None,
        places: Sequence[Place] = (),
        n_standbys: int = 0,
    ) -> None:
        self._name, self._session, self._n_standbys = name, session, n_standbys
        self._places = list(places)
        self._standbys: dict[Place, Standby] = {}
        self._lock = threading.RLock()  # for signal handlers, too
        self._is_wanted, self._over = True, threading.Event()
        self._attempt = 0
        self._idle = threading.Event()
        self._idle.set()
        self.on_change: Callable[[], object] = bool

    @property
    def places(self) -> JoinedClaim:
        """All spare bundles."""
        with self._lock:
            return _joined(self._places)

    @property
    def spares(self) -> list[Spare]:
        """What is kept, in the order of the bundles."""
        with self._lock:
            known = [(place.bundle, self._standbys.get(place)) for place in self._places]
        spares = [
            Spare(bundle.index, bundle.node_id, bundle.node_address, one.facts.pid if one else None)
            for bundle, one in known
        ]
        return sorted(spares, key=lambda spare: spare.bundle_index)

    @property
    def records(self) -> tuple[WorkerRecord, ...]:
        """Who stands by, for those who look at the cluster."""
        return tuple(map(record_of_standby, self.standbys))

    @property
    def standbys(self) -> list[Standby]:
        """Who stands by, in the order of the bundles."""
        with self._lock:
            return sorted(self._standbys.values(), key=lambda standby: standby.place.bundle.index)

    # Preparing.

    def prepare(self, layout: Layout) -> None:
        """Have workers stand by wherever they are missing, and wait until they do.

        Raises:
            WorkerFailureError: One failed or was late, or can't import a module; none of those that were
                started is left.
            WorkerGroupClosedError: The group ends, or somebody wants the bundles.
        """
        while places := self._next(layout):
            try:
                standbys = park(layout, places, partial(self._note_end, places), self._go_on)
                with self._lock:
                    self._standbys |= {standby.place: standby for standby in standbys}
            finally:
                self._idle.set()
            self.on_change()

    def replenish(self, layout: Layout) -> None:
        """The same in a thread of its own; what fails is logged, and tried again for some minutes."""
        with self._lock:
            if not self._missing or not self._idle.is_set():
                return
            self._attempt += 1
        work = partial(self._replenish, layout, self._attempt)
        try:
            threading.Thread(target=work, name="raycrew-standby", daemon=True).start()
        except RuntimeError as error:  # this process can have no more threads
            logger.warning("%s: nobody stands by: %s", self._name, error)

    def _replenish(self, layout: Layout, number: int) -> None:
        for pause_s in (*_PAUSES_S, None):
            try:
                self._check_session()
                self.prepare(layout)
                return
            except WorkerGroupClosedError as error:
                logger.debug("%s: nobody is prepared to stand by: %s", self._name, error)
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, ranks are started as if nobody was to
                again = "after the next restart" if pause_s is None else f"in {pause_s:g} s"
                said = "%s: no worker could be prepared to stand by, which is tried again %s: %s"
                logger.warning(said, self._name, again, error)
            if self._over.wait(pause_s or 0.0) or self._attempt != number:
                return

    @property
    def _missing(self) -> int:
        return 0 if self._over.is_set() else min(self._n_standbys, len(self._places)) - len(self._standbys)

    def _next(self, layout: Layout) -> dict[int, Place]:
        """The bundles for the next workers, as many as are missing; nobody else prepares any then."""
        with self._lock:
            if self._missing <= 0 or not self._idle.is_set():
                return {}
            bare = [place for place in self._places if place not in self._standbys]
            if found := templates(layout, bare[: self._missing]):
                self._idle.clear()
                self._is_wanted = True
            return found

    def _check_session(self) -> None:
        check_session(self._session, f"worker group {self._name!r}")

    def _go_on(self) -> None:
        self._check_session()
        if not self._is_wanted:
            raise WorkerGroupClosedError(f"{self._name}: nobody is to stand by on these bundles any more")

    def _note_end(self, places: Mapping[int, Place], ended: Ended) -> None:
        """Take in what became of workers that could not be prepared."""
        if ended.occupied:
            self._give_up(list(places.values()), ended)

    def _give_up(self, places: Collection[Place], ended: Ended) -> None:
        with self._lock:
            self._places = [place for place in self._places if place not in places]
        release_when_free(ended, _joined(places))

    def _halt(self) -> bool:
        """Have a preparation that is under way, or tried again later, given up; whether that is so now."""
        with self._lock:
            self._is_wanted = False
            self._attempt += 1
        return self._idle.wait(_UNWIND_S)

    # Taking over.

    @contextmanager
    def moving(self, layout: Layout, ranks: Sequence[int]) -> Iterator[Move]:
        """Within, workers of some ranks are replaced, perhaps on other bundles; one thread at a time.

        Who stands by and does not answer is ended, and does not take over.

        Raises:
            NodeLostError: A rank's node is gone, and there is no spare bundle for it.
        """
        move = self._move(layout, [layout.started.order[rank] for rank in ranks])
        try:
            for place in move.lost:  # else they would be missed as long as the group has them
                place.claim.release()
            yield move
        finally:
            with self._lock:
                if move.is_made:
                    came = list(move.vacated)
                else:
                    came = list(move.places.values())
                    self._standbys |= {s.place: s for s in move.arrivals.values() if s is not None}
                self._places += came
            if self._over.is_set():  # it has not waited for this
                self.end(len(ranks))

    def _move(self, layout: Layout, positions: Sequence[int]) -> Move:
        if not positions:
            return Move(layout)
        bundles = layout.claim.bundles
        nodes = self._nodes(bundles)
        lost = [position for position in positions if bundles[position].node_id not in nodes]
        self._look(nodes)
        if lost:
            self._halt()  # all bundles may be wanted
        with self._lock:
            found = choose(layout, positions, lost, self._free)
            if missing := [position for position in lost if position not in found]:
                raise self._refusal(layout, missing)
            vacated = [layout.place(position) for position in found if position not in lost]
            gone = [layout.place(position) for position in lost]
            move = Move(layout.moved(found), found, vacated=vacated, lost=gone)
            arrivals = {position: self._taken(layout, position, place) for position, place in found.items()}
            return replace(move, arrivals=arrivals)

    def _nodes(self, bundles: Sequence[Bundle]) -> set[str]:
        """The nodes that live; while Ray's control service does not answer, all that there were."""
        try:
            return {str(node["NodeID"]) for node in living_nodes()}
        except GetTimeoutError as error:  # those who stand by tell themselves whether they do
            logger.warning("%s: which nodes live is not known at the moment: %s", self._name, error)
            return {bundle.node_id for bundle in (*bundles, *self.places.bundles)}

    def _look(self, nodes: Collection[str]) -> None:
        """Part with bundles that are gone, and with those that stand by and do not answer."""
        with self._lock:
            gone = [place for place in self._places if place.bundle.node_id not in nodes]
            for place in gone:
                self._standbys.pop(place, None)
        standbys = self.standbys
        if gone:
            logger.warning("%s: %d spare bundles are gone with their nodes", self._name, len(gone))
            self._give_up(gone, Ended())
        states = actor_states([standby.handle for standby in standbys], _ANSWER_S) if standbys else {}
        for position, state in states.items():
            if state != "ready":
                standby, said = standbys[position], "has died" if state == "dead" else "does not answer"
                who = f"process {standby.facts.pid}, which stood by on bundle {standby.place.bundle.index}"
                logger.warning("%s: %s %s, and takes nothing over", self._name, who, said)
                self._dismiss(standby)

    def part_with(self, dead: Sequence[Standby]) -> None:
        """Have some that were found dead stand by no more."""
        for standby in dead:
            if self._dismiss(standby):
                logger.warning("%s: process %d, which stood by, has died", self._name, standby.facts.pid)

    def _dismiss(self, standby: Standby) -> bool:
        """End somebody who stands by; not if somebody else does that, or it takes over."""
        with self._lock:
            if self._standbys.get(standby.place) is not standby:
                return False
            del self._standbys[standby.place]
            self._places.remove(standby.place)  # nobody comes there before its end
        ended = Ended(occupied=True, again=partial(self._end_of, standby))
        try:
            ended = self._end_of(standby)
        finally:
            with self._lock:
                if is_kept := not (ended.occupied or self._over.is_set()):
                    self._places.append(standby.place)
            if not is_kept:
                self._give_up([standby.place], ended)
        return True

    def _end_of(self, standby: Standby) -> Ended:
        return end_workers_of(self._own_session, {0: standby.handle}, {0: standby.facts})

    @property
    def _free(self) -> dict[Place, bool]:
        """The bundles on which nobody is being prepared, and whether somebody stands by there."""
        known = ((place, place in self._standbys) for place in self._places)
        return {place: stands_by for place, stands_by in known if stands_by or self._idle.is_set()}

    def _taken(self, layout: Layout, position: int, place: Place) -> Standby | None:
        """Who takes over at a position, from a bundle that is no spare one from now on."""
        self._places.remove(place)
        standby = self._standbys.pop(place, None)
        rank, bundle = layout.started.order.index(position), place.bundle
        is_near = bundle.node_id == layout.claim.bundles[position].node_id
        apart = "" if is_near else f" on another node, {bundle.node_address}"
        if standby is None:
            logger.warning("%s: rank %d moves to spare bundle %d%s", self._name, rank, bundle.index, apart)
        else:
            who = f"process {standby.facts.pid}, which stood by on bundle {bundle.index}{apart}"
            logger.warning("%s: %s, becomes rank %d", self._name, who, rank)
        return standby

    def _refusal(self, layout: Layout, missing: Sequence[int]) -> NodeLostError:
        bundles, order = layout.claim.bundles, layout.started.order
        nodes = {bundles[p].node_id: f"{bundles[p].node_address} ({bundles[p].node_id[:8]})" for p in missing}
        ranks = sorted(order.index(position) for position in missing)
        return NodeLostError(
            f"{self._name!r} lost the bundles of ranks {ranks}: node {', '.join(nodes.values())} is gone, "
            f"and no spare bundle of the group's would do (it has {len(self._places)}); spare_bundles= keeps "
            "some for that. Shut the group and its cluster down and create them anew.",
            list(nodes),
        )

    # The end.

    @property
    def _own_session(self) -> Session:
        if self._session is None:
            raise WorkerGroupClosedError(f"{self._name}: there is no connection to Ray")
        return self._session

    def close(self) -> None:
        """Prepare nothing any more; does not wait."""
        self._over.set()
        self._is_wanted = False

    def end(self, first_key: int) -> Ended:
        """End all that stand by, and give the spare bundles back; idempotent.

        Args:
            first_key: Who is not known to have ended has this key, or one that follows.
        """
        self.close()
        if not self._halt():
            left = {first_key: "a worker that is to stand by is still being prepared"}
            return Ended(left=left, occupied=True, again=partial(self.end, first_key))
        with self._lock:
            places, self._places = self._places, []
            standbys, self._standbys = list(self._standbys.values()), {}
        ended = Ended()
        if standbys:
            keys = range(first_key, first_key + len(standbys))
            handles = {key: one.handle for key, one in zip(keys, standbys, strict=True)}
            facts = {key: one.facts for key, one in zip(keys, standbys, strict=True)}
            ended = end_workers_of(self._own_session, handles, facts)
        release_when_free(ended, _joined(places))
        left = {key: f"it stood by, without a rank: {why}" for key, why in ended.left.items()}
        return replace(ended, late=(), left=left)


def _joined(places: Collection[Place]) -> JoinedClaim:
    return JoinedClaim(tuple(seat for place in places for seat in place.claim.seats))
