"""What is known of the replicas of a service, looked at again and again in a thread of its own."""

import logging
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress

from ray.exceptions import RayError

from raycrew.cluster_core import ClusterError
from raycrew.worker_groups._calls import MultiWorkerFuture, deadline_after, left
from raycrew.worker_groups._group import RayWorkerGroup
from raycrew.worker_groups.errors import (
    ResultTimeoutError,
    WorkerFailureError,
    WorkerGroupClosedError,
    WorkerGroupError,
)
from raycrew.worker_groups.services._endpoint import ReplicaState, Status
from raycrew.worker_groups.services._replicas import Replica

logger = logging.getLogger(__name__)

_ANSWER_S = 5.0


class Following:
    """How the replicas of a group are, as far as they have said.

    Args:
        replicas: How many there are.
    """

    def __init__(self, replicas: int) -> None:
        self._states = {rank: ReplicaState(rank, "restarting") for rank in range(replicas)}
        self._asked: dict[int, MultiWorkerFuture[ReplicaState]] = {}
        self._stop, self._looking, self._noting = threading.Event(), threading.Lock(), threading.Lock()

    @property
    def states(self) -> Sequence[ReplicaState]:
        """How each replica was when it was last asked."""
        return tuple(self._states.values())

    def begin(self, group: RayWorkerGroup, interval_s: float) -> None:
        """Ask now, and then again and again, for as long as somebody has the group."""
        self.look(group)
        arguments = (self, weakref.ref(group), interval_s, self._stop)
        threading.Thread(target=_look_again, args=arguments, name="raycrew-service-look", daemon=True).start()

    def end(self) -> None:
        """Ask no more."""
        self._stop.set()

    def note_loss(self, failure: WorkerFailureError) -> None:
        """Take in that the worker of a replica has died; what it was asked before is of no account."""
        if failure.rank is not None and failure.rank in self._states:
            self._note(failure.rank, "lost", failure.message)

    def _note(self, rank: int, status: Status, reason: str, log_tail: str = "") -> None:
        with self._noting:
            self._asked.pop(rank, None)
            self._states[rank] = ReplicaState(rank, status, reason=reason, log_tail=log_tail)

    def look(self, group: RayWorkerGroup) -> None:
        """Ask all replicas; of one that does not answer what it said before counts.

        Raises:
            WorkerGroupClosedError: The group was shut down.
        """
        group._open()  # noqa: SLF001 - first: a forked process waits for no lock
        with self._looking:
            deadline = deadline_after(_ANSWER_S)
            absent = group.absent_ranks
            for rank in self._states.keys() - self._asked.keys() - set(absent):
                with suppress(ResultTimeoutError):
                    self._asked[rank] = group.on([rank], timeout=_ANSWER_S).call(Replica.state)
            for rank in list(self._asked):
                self._take(rank, group, left(deadline))

    def _take(self, rank: int, group: RayWorkerGroup, timeout_s: float | None) -> None:
        asked = self._asked.get(rank)
        if asked is None:  # it has died meanwhile
            return
        try:
            (state,) = asked.get_results(timeout=timeout_s)
        except ResultTimeoutError:
            return
        except WorkerFailureError as failure:
            if group._supervision.has_given_up:  # noqa: SLF001 - made for this package
                reason = f"no restarts of its worker are left: {failure.message}"
                self._note(rank, "failed", reason, failure.log_tail)
            else:
                self._note(rank, "lost", failure.message)
        except BaseException:
            self._asked.pop(rank, None)
            raise
        else:
            with self._noting:
                if self._asked.pop(rank, None) is asked:
                    self._states[rank] = state


def _look_again(
    following: Following, owner: "weakref.ref[RayWorkerGroup]", interval_s: float, stop: threading.Event
) -> None:
    while not stop.wait(interval_s):
        group = owner()
        if group is None:
            return
        try:
            following.look(group)
        except WorkerGroupClosedError:
            return
        except (WorkerGroupError, ClusterError, RayError) as error:
            logger.warning("the replicas of %s can't be asked now: %s", group.name, error)
        del group
