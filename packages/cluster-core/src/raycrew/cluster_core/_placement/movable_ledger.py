"""A ledger that moves to an actor as soon as another process shares it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from threading import RLock
from typing import TypeVar

from raycrew.cluster_core._placement.ledger import Slot, SlotLedger
from raycrew.cluster_core._placement.shared_ledger import SharedLedger
from raycrew.cluster_core._planning import Bundle
from raycrew.cluster_core.errors import ClusterClosedError

T = TypeVar("T")


class MovableLedger:
    """The same as a `SlotLedger`, here or in an actor; what is asked while it moves is asked where it goes.

    Args:
        ledger: Where it is.
    """

    def __init__(self, ledger: SlotLedger | SharedLedger) -> None:
        self.slots = ledger.slots
        self._ledger = ledger
        self._is_closed = False
        self._moving = RLock()

    def _use(self, use: Callable[[SlotLedger | SharedLedger], T]) -> T:
        with self._moving:
            ledger = self._ledger
            if isinstance(ledger, SlotLedger):
                return use(ledger)
        return use(ledger)

    def move(self) -> SharedLedger:
        """Move it into an actor, if it is not there yet.

        Raises:
            ClusterClosedError: It was closed.
        """
        with self._moving:
            if isinstance(self._ledger, SlotLedger):
                self._ledger = SharedLedger.share(self._ledger)
            if self._is_closed:
                self._ledger.close()
                raise ClusterClosedError("the virtual cluster was shut down while it was handed on")
            return self._ledger

    def close(self) -> None:
        """End what other processes share, now or once it has moved; for the owner."""
        self._is_closed = True
        ledger = self._ledger  # Not when it has moved: whoever moves it may be waiting for this.
        if isinstance(ledger, SharedLedger):
            ledger.close()

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """All bundles, ordered by (node, device index)."""
        return self._use(lambda ledger: ledger.bundles)

    def seated(self, seats: Sequence[int]) -> tuple[Bundle, ...]:
        """The bundles on some seats."""
        return self._use(lambda ledger: ledger.seated(seats))

    def seats(self, indices: Sequence[int] | None = None) -> tuple[int, ...]:
        """The seats of some bundle indices, or of all bundles in their order."""
        return self._use(lambda ledger: ledger.seats(indices))

    def unknown_seats(self, partly: set[int]) -> set[int]:
        """Seats whose device a claim on some bundles has to learn first."""
        return self._use(lambda ledger: ledger.unknown_seats(partly))

    def take(self, indices: Sequence[int] | None, holder: str) -> Slot:
        """Take one slot on each named bundle (all of them for None), or on none of them."""
        return self._use(lambda ledger: ledger.take(indices, holder))

    def release(self, token: str, seats: Collection[int] | None = None) -> None:
        """Give slots back; idempotent."""
        self._use(lambda ledger: ledger.release(token, seats))

    def release_holder(self, holder: str) -> int:
        """Give back all slots of a holder; return how many claims that were."""
        return self._use(lambda ledger: ledger.release_holder(holder))

    def learn(self, devices: Mapping[int, int]) -> None:
        """Note which physical device each seat holds."""
        self._use(lambda ledger: ledger.learn(devices))

    def holders(self) -> dict[int, tuple[str, ...]]:
        """Who holds slots, by bundle index."""
        return self._use(lambda ledger: ledger.holders())

    def __reduce__(self) -> tuple[type, tuple[SharedLedger]]:
        """Travel to another process, which then shares it with this one."""
        return type(self), (self.move(),)
