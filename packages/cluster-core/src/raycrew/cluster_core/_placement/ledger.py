"""Which bundles there are, in which order, and who holds a slot on them.

A *seat* is a bundle's position in allocation order and never changes; a bundle's *index* is its position
in the order (node, device) and is settled once the devices of its node are known. Where the bundles of a node
differ, each kind keeps its positions.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any, Protocol
from uuid import uuid4

from raycrew.cluster_core._placement.forgetting import give_back_when_forgotten
from raycrew.cluster_core._placement.indices import at, check_indices
from raycrew.cluster_core._planning import RESOURCE_STEP, Bundle, Process
from raycrew.cluster_core.errors import BundlesOccupiedError


@dataclass(frozen=True, slots=True)
class Slot:
    """Slots taken together under one holder's name: one on each seat.

    Attributes:
        token: Tells the claim from all others.
        holder: Name of the holder.
        seats: Where.
        process: Whose end ends the claim; None is the process that made the cluster.
    """

    token: str
    holder: str
    seats: tuple[int, ...]
    process: Process | None = None


def share_of(amount: float, slots: int) -> float:
    """One slot's part of `amount`, rounded down to Ray's step so that all slots together always fit."""
    return amount if slots == 1 else math.floor(amount * RESOURCE_STEP / slots) / RESOURCE_STEP


def share_options(resources: Mapping[str, float], slots: int) -> dict[str, Any]:
    """Ray actor options that ask for one slot's share of a bundle's resources."""
    shares = {name: share_of(amount, slots) for name, amount in resources.items()}
    options: dict[str, Any] = {"num_cpus": shares.pop("CPU", 0), "num_gpus": shares.pop("GPU", 0)}
    if "memory" in shares:
        options["memory"] = int(shares.pop("memory"))
    return {**options, "resources": shares}


class SlotLedger:
    """Bundles in their order, and `slots` slots on each; safe to use from several threads.

    Args:
        bundles: In allocation order.
        slots: Slots of each bundle.
        accelerator: Resource name of the devices that bundles may hold.
    """

    def __init__(self, bundles: Sequence[Bundle], slots: int, accelerator: str = "GPU") -> None:
        self.slots = slots
        self._accelerator = accelerator
        self._seats = list(bundles)
        self._taken: dict[str, Slot] = {}
        self._given_back: dict[str, int] = {}
        self._lock = RLock()
        self._sort()

    def _sort(self) -> None:
        """Put the bundles of a node that are alike in device order, once all of theirs are known."""
        self._order = sorted(range(len(self._seats)), key=lambda seat: self._seats[seat].node_index)
        for positions in self._alike(self._order):
            alike = [
                (self._seats[seat].device_index, seat) for seat in map(self._order.__getitem__, positions)
            ]
            known = [(device, seat) for device, seat in alike if device is not None]
            if len(known) == len(alike):
                for position, (_, seat) in zip(positions, sorted(known), strict=True):
                    self._order[position] = seat
        for index, seat in enumerate(self._order):
            self._seats[seat] = replace(self._seats[seat], index=index)

    def _alike(self, order: Sequence[int]) -> list[list[int]]:
        """Positions in an order of seats, together where the bundles are alike and on one logical node."""
        alike: dict[object, list[int]] = {}
        for position, seat in enumerate(order):
            bundle = self._seats[seat]
            kind = bundle.node_index, frozenset(bundle.resources.items())
            alike.setdefault(kind, []).append(position)
        return list(alike.values())

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """All bundles, ordered by (node, device index)."""
        with self._lock:
            return tuple(self._seats[seat] for seat in self._order)

    def seated(self, seats: Sequence[int]) -> tuple[Bundle, ...]:
        """The bundles on some seats as they are known now, in the order of `seats`."""
        with self._lock:
            return tuple(self._seats[seat] for seat in seats)

    def seats(self, indices: Sequence[int] | None = None) -> tuple[int, ...]:
        """The seats of some bundle indices, or of all bundles in their order.

        Raises:
            ValueError: An index is out of range or repeated.
        """
        with self._lock:
            if indices is None:
                return tuple(self._order)
            check_indices(indices, len(self._order))
            return tuple(self._order[index] for index in indices)

    def take(
        self,
        indices: Sequence[int] | None,
        holder: str,
        process: Process | None = None,
        token: str | None = None,
    ) -> Slot:
        """Take one slot on each named bundle (all of them for None), or on none of them.

        Args:
            indices: Bundle indices, or None for all.
            holder: Shown to those who find no free slot.
            process: Whose end ends the claim.
            token: What tells the claim from all others; what it took already is the answer again.

        Raises:
            ValueError: An index is out of range or repeated.
            BundlesOccupiedError: A bundle has no free slot.
        """
        token = token or uuid4().hex
        with self._lock:
            if token in self._taken:
                return self._taken[token]
            seats = self.seats(indices)
            full = {
                self._seats[seat].index: names
                for seat in seats
                if len(names := self._held_by(seat)) >= self.slots
            }
            if full:
                raise BundlesOccupiedError(holder, self.slots, full)
            slot = self._taken[token] = Slot(token, holder, seats, process)
            return slot

    def release(self, token: str, seats: Collection[int] | None = None) -> None:
        """Give slots back: all of a claim, or those on some seats; idempotent."""
        with self._lock:
            slot = self._taken.pop(token, None)
            if slot is not None and seats is not None:
                kept = tuple(seat for seat in slot.seats if seat not in seats)
                self._taken[token] = replace(slot, seats=kept)

    def release_holder(self, holder: str, token: str | None = None) -> int:
        """Give back all slots of a holder; return how many claims that were.

        What a token gave back already is the answer again, and nothing is given back.
        """
        with self._lock:
            if token in self._given_back:
                return self._given_back[token]
            tokens = [token for token, slot in self._taken.items() if slot.holder == holder]
            for one in tokens:
                del self._taken[one]
            if token is not None:
                self._given_back[token] = len(tokens)
            return len(tokens)

    def processes(self) -> set[Process]:
        """The processes that hold slots, but for the one that made the cluster."""
        with self._lock:
            return {slot.process for slot in self._taken.values() if slot.process is not None}

    def forget(self, gone: Collection[Process]) -> int:
        """Give back all slots of processes that are no more; return how many claims that were."""
        with self._lock:
            tokens = [token for token, slot in self._taken.items() if slot.process in gone]
            for token in tokens:
                del self._taken[token]
            return len(tokens)

    def learn(self, devices: Mapping[int, int]) -> None:
        """Note which physical device each seat holds, and put the bundles of settled nodes in device order.

        Of several devices that slots share, each slot sees others; so there is nothing to note.

        Raises:
            ValueError: A seat is already known to hold another device.
        """
        with self._lock:
            devices = {seat: device for seat, device in devices.items() if self._tells_device(seat)}
            for seat, device in devices.items():
                known = self._seats[seat].device_index
                if known not in (None, device):
                    index = self._seats[seat].index
                    raise ValueError(f"bundle {index} was known to hold device {known}, not device {device}")
            for seat, device in devices.items():
                self._seats[seat] = replace(self._seats[seat], device_index=device)
            self._sort()

    def unknown_seats(self, partly: set[int]) -> set[int]:
        """Seats with a free slot and no known device, where `partly` names some of those alike, not all."""
        with self._lock:
            return {
                seat
                for seats in map(set, self._alike(range(len(self._seats))))
                if seats & partly and not seats <= partly
                for seat in seats
                if self._seats[seat].device_index is None
                and self._tells_device(seat)
                and len(self._held_by(seat)) < self.slots
            }

    def _tells_device(self, seat: int) -> bool:
        """Whether all slots of a seat see the same device first."""
        return self.slots == 1 or self._seats[seat].resources.get(self._accelerator, 0.0) <= 1

    def holders(self) -> dict[int, tuple[str, ...]]:
        """Who holds slots, by bundle index; bundles that nobody holds are left out."""
        with self._lock:
            held = ((self._seats[seat].index, self._held_by(seat)) for seat in self._order)
            return {index: names for index, names in held if names}

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=RLock())

    def _held_by(self, seat: int) -> tuple[str, ...]:
        return tuple(slot.holder for slot in self._taken.values() if seat in slot.seats)


class Ledger(Protocol):
    """What a claim needs of a ledger."""

    slots: int

    def seated(self, seats: Sequence[int]) -> Sequence[Bundle]:
        """The bundles on some seats."""
        ...

    def learn(self, devices: Mapping[int, int]) -> None:
        """Note which physical device each seat holds."""
        ...

    def release(self, token: str, seats: Collection[int] | None = None) -> None:
        """Give slots back."""
        ...


class LedgerClaim:
    """A `Claim` on a ledger.

    Args:
        ledger: Where it is held.
        slot: What this claim holds there.
        strategy_of: Ray scheduling strategy that leads to a seat.
        check: Raises if bundles on some seats are gone. Its cluster is not forgotten until the claim is
            released or forgotten itself.
        is_held: Whether there still is anything that has to be given back if the claim is forgotten.
        ask: Learns which devices some seats hold, of those of which it is not known.
    """

    def __init__(
        self,
        ledger: Ledger,
        slot: Slot,
        strategy_of: Callable[[int], Any],
        check: Callable[[Collection[int]], object] = tuple,
        is_held: Callable[[], bool] = bool,
        ask: Callable[[Collection[int]], object] = tuple,
    ) -> None:
        self._check = check
        self._ask = ask
        self._ledger = ledger
        self._slot = slot
        self._given_back = frozenset[int]()
        self._lock = RLock()
        self._strategy_of = strategy_of
        what = f"a claim of {slot.holder!r} was forgotten without release(); its slots are given back"
        self._unwatch = give_back_when_forgotten(self, what, lambda: ledger.release(slot.token), is_held)

    @property
    def bundles(self) -> Sequence[Bundle]:
        """The claimed bundles, in the order that they were asked for."""
        return self._ledger.seated(self._slot.seats)

    def actor_options(self, position: int) -> dict[str, Any]:
        """Ray actor options that place a worker on `bundles[position]` with this claim's share of it."""
        seat = self._seat_at(position)
        (bundle,) = self._ledger.seated([seat])
        options = share_options(bundle.resources, self._ledger.slots)
        return {**options, "scheduling_strategy": self._strategy_of(seat)}

    def learn(self, devices: Mapping[int, int]) -> None:
        """Tell the cluster which physical device each position turned out to hold."""
        self._ledger.learn({self._seat_at(position): device for position, device in devices.items()})

    def settle(self) -> None:
        """Learn which devices the bundles hold from the bundles themselves, as nobody on them will tell.

        Their order is final then, and another holder's is the same. This claim's share must be free.

        Raises:
            ClusterError: Not every bundle answered.
        """
        self._ask(self._held_seats)

    def check(self) -> None:
        """Make sure that the bundles are still there; what became of others of the cluster is of no matter.

        Raises:
            ClusterError: Some are not; says which, and what became of them.
        """
        self._check(self._held_seats)

    def _seat_at(self, position: int) -> int:
        return at(self._slot.seats, position, "position")

    @property
    def _held_seats(self) -> list[int]:
        return [seat for seat in self._slot.seats if seat not in self._given_back]

    def give_back(self, positions: Collection[int]) -> None:
        """Give the slots on some of `bundles` back, and keep the others, whose positions stay; idempotent.

        Without any left, it is as `release`.

        Raises:
            IndexError: There is no such position; nothing is given back.
        """
        seats = set(map(self._seat_at, positions))
        self._ledger.release(self._slot.token, seats)
        with self._lock:
            self._given_back |= seats
            is_empty = not self._held_seats
        if is_empty:
            self.release()

    def release(self) -> None:
        """Give all slots back; idempotent."""
        self._ledger.release(self._slot.token)
        self._unwatch()
        self._check = tuple
