"""One ledger for all processes that hold a copy of a virtual cluster."""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycrew.cluster_core import _ray
from raycrew.cluster_core._placement.ledger import Slot, SlotLedger
from raycrew.cluster_core._planning import Bundle
from raycrew.cluster_core.errors import BundlesOccupiedError, ClusterClosedError, ClusterError

logger = logging.getLogger(__name__)

_ANSWER_S = 60.0
_AGAIN_S = 0.2


class LedgerKeeper:
    """Keeps the ledger in an actor that the owner of the virtual cluster started."""

    def __init__(self, ledger: SlotLedger) -> None:
        self._ledger = ledger

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the ledger, or read a property of it.

        Processes that are gone hold nothing; whether they are is asked only where it makes a difference.
        """
        if name == "holders":
            self._forget_gone()
        try:
            return self._call(name, *arguments)
        except BundlesOccupiedError:
            if not self._forget_gone():
                raise
            return self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> Any:
        found = getattr(self._ledger, name)
        return found(*arguments) if callable(found) else found

    def _forget_gone(self) -> int:
        processes = self._ledger.processes()
        return self._ledger.forget(_ray.gone(processes)) if processes else 0


class SharedLedger:
    """The same as a `SlotLedger`, kept by an actor."""

    def __init__(self, keeper: Any, slots: int) -> None:
        self.slots = slots
        self._keeper = keeper
        self._session = _ray.check_connected()

    @classmethod
    def share(cls, ledger: SlotLedger) -> "SharedLedger":
        """Move a ledger into an actor that ends with this process and lies on its node: no other one matters.

        Only where that is being drained Ray starts nothing there any more, and chooses another one.
        """
        here = _ray.node_id()
        options: dict[str, Any] = {"num_cpus": 0}
        if here not in _ray.draining_node_ids():
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=False)
        return cls(_ray.start_actor(options, LedgerKeeper, ledger), ledger.slots)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the ledger that does the same when it is called twice: an answer may be lost."""
        deadline = time.monotonic() + _ANSWER_S
        try:
            while (left := deadline - time.monotonic()) > 0:
                with suppress(ActorUnavailableError), self._session.while_connected():
                    return self._session.get(self._keeper.call.remote(name, *arguments), timeout=left)
                self._session.check_wanted()
                time.sleep(_AGAIN_S)
        except RayTaskError as error:
            if isinstance(error.cause, (ClusterError, ValueError, TypeError)):
                raise error.cause from None
            raise
        except RayActorError as error:
            raise ClusterClosedError("the owner of this virtual cluster shut it down, or is gone") from error
        except GetTimeoutError:
            pass
        raise ClusterError(f"the ledger of the virtual cluster gave no answer in {_ANSWER_S:g} s")

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """All bundles, ordered by (node, device index)."""
        return tuple(self._call("bundles"))

    def seated(self, seats: Sequence[int]) -> tuple[Bundle, ...]:
        """The bundles on some seats."""
        return tuple(self._call("seated", tuple(seats)))

    def seats(self, indices: Sequence[int] | None = None) -> tuple[int, ...]:
        """The seats of some bundle indices, or of all bundles in their order."""
        return tuple(self._call("seats", indices))

    def unknown_seats(self, partly: set[int]) -> set[int]:
        """Seats whose device a claim on some bundles has to learn first."""
        return set(self._call("unknown_seats", partly))

    def take(self, indices: Sequence[int] | None, holder: str) -> Slot:
        """Take one slot on each named bundle (all of them for None), or on none of them.

        The claim ends with this process, which Ray tells a moment later; behind a proxy with the job. One
        whose answer is not awaited is given back.
        """
        process, token = _ray.this_process(), uuid4().hex
        try:
            slot: Slot = self._call("take", indices, holder, process, token)
        except (BundlesOccupiedError, ValueError, TypeError):  # Refused: nothing was taken.
            raise
        except BaseException:
            self._take_back(token, holder)
            raise
        return slot

    def _take_back(self, token: str, holder: str) -> None:
        """Give back what may have been taken; the ledger hears of it after the claim, and nobody waits."""
        try:
            with suppress(ClusterClosedError), self._session.while_connected():
                self._keeper.call.remote("release", token)
        except Exception as error:  # noqa: BLE001 - why it is taken back is what the caller has to know
            logger.warning("a claim of %r may be held until this process ends: %s", holder, error)

    def release(self, token: str, seats: Collection[int] | None = None) -> None:
        """Give slots back; idempotent. With the owner or the connection they went back by themselves."""
        with suppress(ClusterClosedError):
            self._call("release", token, seats)

    def release_holder(self, holder: str) -> int:
        """Give back all slots of a holder; return how many claims that were."""
        return int(self._call("release_holder", holder, uuid4().hex))

    def learn(self, devices: Mapping[int, int]) -> None:
        """Note which physical device each seat holds."""
        self._call("learn", dict(devices))

    def holders(self) -> dict[int, tuple[str, ...]]:
        """Who holds slots, by bundle index."""
        return dict(self._call("holders"))

    def close(self) -> None:
        """End the actor; for the owner."""
        _ray.end_actor(self._keeper)

    def __reduce__(self) -> tuple[type, tuple[Any, int]]:
        return type(self), (self._keeper, self.slots)
