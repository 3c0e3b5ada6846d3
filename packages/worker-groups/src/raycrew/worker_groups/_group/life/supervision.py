"""What a group does about workers that die: it tells the driver, and replaces them within a budget."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from ray.exceptions import RayError

from raycrew.cluster_core import ClusterError
from raycrew.worker_groups._calls import Recovery, described, has_died, parts_of
from raycrew.worker_groups._group.life.budget import RestartBudget
from raycrew.worker_groups._group.life.states import Lifecycle
from raycrew.worker_groups._ray import ActorState, may_come_back
from raycrew.worker_groups._start import GroupOptions
from raycrew.worker_groups._worker import MethodInfo
from raycrew.worker_groups.errors import WorkerFailureError, WorkerGroupError
from raycrew.worker_groups.sharding import WorkerFacts

logger = logging.getLogger(__name__)

#: So long Ray may take until it says that a worker is dead, after a call was seen to fail of that.
DOUBT_S = 10.0
_LOOK_S = 0.5
_ASIDE_LOOK_S = 0.02

#: Its rank, node and number there: on another node that may be anybody's.
_Process = tuple[int | None, str | None, int | None]

_REFUSALS = (WorkerGroupError, ClusterError, RayError)


class Replaceable(Protocol):
    """A group whose workers can be replaced."""

    def replace_dead(self, pause: Callable[[], bool]) -> Sequence[int]:
        """Replace dead workers, a torn group gets a new generation in any case.

        Args:
            pause: Called before, if there is anything to do; says whether it has taken time.
        """
        ...

    @property
    def is_torn(self) -> bool:
        """Whether its last new generation failed, so that some workers may not have heard of it."""
        ...

    def is_present(self, rank: int | None, node_id: str | None, pid: int | None) -> bool:
        """Whether a process is the one that a rank has now."""
        ...

    def goes_on_without(self, ranks: Collection[int | None]) -> bool:
        """Whether it can be used while these ranks are replaced."""
        ...

    def is_without(self, ranks: Collection[int | None]) -> bool:
        """Whether it is used without these ranks now."""
        ...

    def status(self, rank: int) -> ActorState:
        """What a rank's worker is up to."""
        ...


class Supervision:
    """Of one group.

    Args:
        name: Its name.
        options: What its caller wishes.
        life: Its state.
    """

    def __init__(self, name: str, options: GroupOptions, life: Lifecycle) -> None:
        self._name, self._options, self._life = name, options, life
        self._budget = RestartBudget(options.n_restarts)
        self._known: set[_Process] = set()
        self._lock = threading.Lock()

    @property
    def is_needed(self) -> bool:
        """Whether anything is done about workers that die."""
        return self._options.restart_on_failure or self._options.on_worker_failure is not None

    @property
    def has_given_up(self) -> bool:
        """Whether workers that are dead stay so, as no restart was left when it was asked for."""
        return self._budget.is_refusing

    def recovery(self, method: MethodInfo, group: Replaceable, send: Callable[[], Any]) -> Recovery:
        """What becomes of a call should its worker die.

        Args:
            method: The method.
            group: The group.
            send: Sends the call again.
        """
        may_go_again = method.name in self._options.idempotent_methods and "generator" not in method.kind
        after, in_passing = partial(self._after, group), partial(self._after, group, in_passing=True)
        if may_go_again:
            return Recovery(after, send, in_passing=in_passing)
        return Recovery(in_passing)

    def expect(self, processes: Mapping[int, WorkerFacts]) -> None:
        """Say nothing of these ranks' processes, which the group ends itself."""
        with self._lock:
            self._known.update((rank, facts.node_id, facts.pid) for rank, facts in processes.items())

    def _after(self, group: Replaceable, error: WorkerFailureError, *, in_passing: bool = False) -> bool:
        """Whether the group is whole again after a call failed as workers of it died.

        In passing it is not waited for that where the group goes on without them.
        """
        if self._life.state in ("closing", "closed"):
            return False
        try:
            died = self._died(group, error)
        except _REFUSALS as refused:
            error.add_note(f"whether its workers live is not known: {refused}")
            return False
        for part in died:
            self._tell(part)
        if not self._options.restart_on_failure or not died:
            return False
        ranks = {part.rank for part in died}
        if in_passing and group.goes_on_without(ranks):
            self._restart_aside(group, error, died)
            return False
        return self._restarted(group, error, died)

    def _restart_aside(
        self, group: Replaceable, error: WorkerFailureError, died: Sequence[WorkerFailureError]
    ) -> None:
        """Have the group restarted while it goes on; it is without its dead workers when this returns."""
        ranks = {part.rank for part in died}
        if not group.is_without(ranks) and _are_present(group, died):
            restart = threading.Thread(
                target=self._restarted, args=(group, error, died), name="raycrew-aside", daemon=True
            )
            try:
                restart.start()
            except RuntimeError:  # this process can have no more threads
                self._restarted(group, error, died)
                return
            until = time.monotonic() + DOUBT_S
            while restart.is_alive() and not group.is_without(ranks) and time.monotonic() < until:
                restart.join(_ASIDE_LOOK_S)
        if group.is_without(ranks):
            who = ", ".join(sorted(map(str, ranks)))
            error.add_note(f"its group goes on without rank {who}, which is being replaced")

    def _died(self, group: Replaceable, error: WorkerFailureError) -> list[WorkerFailureError]:
        """The failures whose workers have died for sure."""
        until, died = time.monotonic() + DOUBT_S, []
        for part in filter(has_died, parts_of(error)):
            if part.cause is None or not may_come_back(part.cause) or self._is_gone(group, part, until):
                died.append(part)
            else:
                error.add_note(f"rank {part.rank} could not be reached, but has not died as far as is known")
        return died

    def _is_gone(self, group: Replaceable, part: WorkerFailureError, until: float) -> bool:
        while part.rank is not None and group.is_present(*_process_of(part)):
            if (status := group.status(part.rank)) == "dead":
                return True
            if status == "ready" or time.monotonic() >= until:
                return False
            self._life.pause(_LOOK_S)
        return True

    def _tell(self, failure: WorkerFailureError) -> None:
        process = _process_of(failure)
        with self._lock:
            is_news = process not in self._known
            self._known.add(process)
        if is_news and self._options.on_worker_failure is not None:
            try:
                self._options.on_worker_failure(failure)
            except Exception:  # the caller is told of the worker, not of this
                logger.exception("on_worker_failure of %s raised", self._name)

    def _restarted(
        self, group: Replaceable, error: WorkerFailureError, died: Sequence[WorkerFailureError]
    ) -> bool:
        until = time.monotonic() + DOUBT_S
        while group.is_torn or _are_present(group, died):
            try:
                if not group.replace_dead(self._await_turn) and _are_present(group, died):
                    self._wait_until(until)  # not dead for Ray yet
            except WorkerFailureError as failure:
                logger.warning("a restart of %s failed: %s", self._name, failure)
            except _REFUSALS as refused:
                logger.info("%s was not restarted: %s", self._name, refused)
                error.add_note(f"its group was not restarted: {refused}")
                return False
            except Exception as raised:  # by a function of the caller's: `init`, say
                logger.exception("%s was not restarted", self._name)
                error.add_note(f"its group was not restarted: {described(raised)}")
                return False
            finally:
                self._budget.ended()
        return True

    def _wait_until(self, deadline: float) -> None:
        if time.monotonic() >= deadline:
            raise WorkerGroupError(f"after {DOUBT_S:g} s Ray still does not say that its worker is dead")
        self._life.pause(_LOOK_S)

    def _await_turn(self) -> bool:
        pause_s = self._budget.take()
        if pause_s:
            logger.warning("%s: the next restart is in %.1f s", self._name, pause_s)
        self._life.pause(pause_s)
        return pause_s > 0


def _are_present(group: Replaceable, died: Iterable[WorkerFailureError]) -> bool:
    return any(group.is_present(*_process_of(part)) for part in died)


def _process_of(failure: WorkerFailureError) -> _Process:
    return failure.rank, failure.node_id, failure.pid
