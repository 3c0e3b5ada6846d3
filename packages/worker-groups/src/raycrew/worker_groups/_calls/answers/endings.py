"""When calls have ended for good: not yet where their group is restarted, and they are sent again."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from raycrew.cluster_core import Session
from raycrew.worker_groups._calls.answers.ends import when_done
from raycrew.worker_groups._calls.answers.failures import described
from raycrew.worker_groups._calls.answers.gathering import Gathering
from raycrew.worker_groups._calls.answers.waiting import (
    Settled,
    await_some,
    by_rank,
    deadline_after,
    left,
    settle,
)
from raycrew.worker_groups._ray import is_behind_proxy, is_death, while_connected
from raycrew.worker_groups.errors import WorkerFailureError, WorkerGroupClosedError, WorkerGroupError

logger = logging.getLogger(__name__)

_SLICE_S = 0.1

E = TypeVar("E", bound="Endings")


@dataclass
class Revival:
    """The restart of a group for calls that were lost with a worker."""

    sent: Sequence[Any]
    is_over: threading.Event = field(default_factory=threading.Event)


class Endings(Gathering):
    """Calls of which can be told whether they have ended."""

    _revival: Revival | None
    _looking: threading.Lock
    _losses_told: bool

    def done(self) -> bool:
        """Whether every call has ended, well or not.

        A call that is to be sent again, once its group was restarted, has not: this begins the restart, and
        does not wait for it. Large results stay on their nodes, and are loaded behind a `ray://` proxy only,
        for calls of idempotent methods.

        Raises:
            WorkerGroupClosedError: The connection to Ray has ended, and the calls with it.
        """
        return self.wait(timeout=0)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every call has ended, well or not, and no longer than the call's own deadline.

        A call that is to be sent again, once its group was restarted, has not: this begins the restart.

        Args:
            timeout: Seconds.

        Returns:
            Whether they have.

        Raises:
            WorkerGroupClosedError: The connection to Ray has ended, and the calls with it.
        """
        asked = deadline_after(timeout)
        return self._have_ended(
            lambda: min((d for d in (asked, self._deadline) if d is not None), default=None)
        )

    def exception(self, timeout: float | None = None) -> WorkerFailureError | None:
        """Wait for the calls; what became of them as they were sent last, or None where all is well.

        Unlike `get_results`, this has no group restarted and no call sent again: whoever keeps other ranks
        waiting can let them go first. `get_results` raises the same afterwards, or has the calls sent again.

        Args:
            timeout: Seconds to wait, besides the call's own deadline; None waits for that alone.

        Raises:
            ResultTimeoutError: Ranks have not answered in time.
            WorkerGroupClosedError: The connection to Ray has ended, and the calls with it.
        """
        try:
            self._gathered(self._until(timeout))
        except WorkerFailureError as error:
            return error
        return None

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Have a function called with this future, in a thread of its own, once every call has ended.

        It is called soon where they have ended before, and not at all where the connection to Ray ends first.
        What it raises is logged. Calls that are sent again, once their group was restarted, have not ended.
        Unlike `done` and `wait`, this loads the results into this process.

        Raises:
            WorkerGroupClosedError: The connection to Ray has ended, and the calls with it.
        """
        self._check()
        with while_connected(self._check):
            calls = [end.future() for end in self._ends]

        def tell() -> None:
            try:
                self._have_ended(lambda: None)
            except WorkerGroupClosedError:  # the calls are gone; what the callback raises is another matter
                return
            callback(self)

        when_done(calls, tell, f"the callback of {self!r}")

    def _have_ended(self, deadline: Callable[[], float | None]) -> bool:
        """Wait for the end of all calls, of those sent again too; the deadline may change meanwhile."""
        while self:
            sent, ends = list(self), self._ends
            count, until = len(ends), deadline()
            if len(await_some(ends, until, self._check, count=count, fetch_local=False)) < count:
                return False
            if self._are_final(sent, ends):
                return True
            if not self._await_revival(deadline()):
                return False
        return True

    def _are_final(self, sent: Sequence[Any], ends: Sequence[Any]) -> bool:
        """Whether calls, all of which have ended, are sent no more; else their group's restart has begun."""
        with self._looking:
            if list(self) != sent:
                return False
            if self._recovery is None or not self._recovery.sends_again:
                self._tell_losses(ends)
                return True
            if self._revival is None or self._revival.sent != sent:
                if not any(map(self._died, sent)):
                    self._recovery = None
                    return True
                revival = Revival(sent)
                revive = threading.Thread(
                    target=self._revive, args=(revival,), name="raycrew-revival", daemon=True
                )
                revive.start()
                self._revival = revival  # only now: without a thread nobody may wait for it
        return False

    def _tell_losses(self, ends: Sequence[Any]) -> None:
        """Whoever sent these learns of a worker that was lost, though nobody may ever take the results.

        Behind a proxy each would have to be loaded for it, however large: whoever takes them learns it.
        """
        if self._recovery is not None and self._recovery.is_told_of_losses and not self._losses_told:
            if not is_behind_proxy() and any(map(self._died, ends)):
                self._note_loss()
            self._losses_told = True

    def _await_revival(self, deadline: float | None) -> bool:
        """Wait until what became of the calls is known; whether it was in time."""
        while self._revival is not None and not self._revival.is_over.wait(left(deadline, _SLICE_S)):
            self._check()
            Session.check_wanted()
            if left(deadline) == 0.0:
                return False
        return True

    def _revive(self, revival: Revival) -> None:
        """Have the group restarted and the calls sent again, as whoever takes their results would."""
        sent = revival.sent
        try:
            rank_of = dict(zip(sent, self.called_workers, strict=True))
            lost = [call for call in sent if self._died(call)]
            errors = settle(lost, None, self._check).errors
            died = Settled(errors={i: error for i, error in errors.items() if is_death(error)})
            self._again(self._failed(by_rank(died, [rank_of[call] for call in lost])), None, sent)
        except WorkerFailureError as error:  # told by the same calls to whoever takes their results
            self._recovery, self._why = None, getattr(error, "__notes__", [])
        except WorkerGroupError as error:  # that their group has got another size, say
            self._recovery, self._why = None, [f"this call was not sent again: {error}"]
        except Exception as error:
            logger.exception("%r was not sent again", self)
            self._recovery, self._why = None, [f"this call was not sent again: {described(error)}"]
        finally:
            revival.is_over.set()


def first_ended(futures: Sequence[E], timeout: float | None) -> list[E]:
    """Those whose calls have all ended, once there is one; none where the time was over."""
    deadline = deadline_after(timeout)
    while _first_has_ended(futures, deadline):
        if found := [future for future in futures if future.done()]:
            return found
        if left(deadline) == 0.0:
            break
        for future in futures:
            future._await_revival(deadline_after(left(deadline, _SLICE_S)))  # noqa: SLF001 - of this module
    return []


def _first_has_ended(futures: Sequence[Endings], deadline: float | None) -> bool:
    """Wait until all calls of one of some futures have ended, perhaps to be sent again."""
    ends = [set(future._ends) for future in futures]  # noqa: SLF001
    waiting = set().union(*ends)
    while all(ends):
        done = set(futures[0]._wait_for(list(waiting), 1, left(deadline)))  # noqa: SLF001
        if not done:
            return False
        waiting -= done
        ends = [several - done for several in ends]
    return True
