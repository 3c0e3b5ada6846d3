"""The claims on a cluster's bundles, and the devices that are learnt on the way."""

from collections.abc import Callable, Collection, Sequence
from functools import partial

from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raycrew.cluster_core import _ray
from raycrew.cluster_core._devices import probe_devices
from raycrew.cluster_core._placement.allocation import Allocation
from raycrew.cluster_core._placement.ledger import LedgerClaim, SlotLedger, share_of
from raycrew.cluster_core._placement.movable_ledger import MovableLedger
from raycrew.cluster_core._planning import Bundle
from raycrew.cluster_core.errors import BundlesLostError, NodeLostError

_PROBE_S = 120.0


class Claims:
    """Who holds slots on the bundles of an allocation; copies in other processes share them.

    Args:
        allocation: The bundles.
        slots: Slots of each bundle.
        accelerator: Resource name of the accelerator in each bundle, or in some, if there is one.
        ledger: Where the slots are written down; a new one by default.

    Attributes:
        are_held: Whether the bundles were not given back yet, and with them all claims.
    """

    def __init__(
        self,
        allocation: Allocation,
        slots: int,
        accelerator: str | None,
        ledger: MovableLedger | None = None,
    ) -> None:
        self._allocation, self._slots, self._accelerator = allocation, slots, accelerator
        self._ledger = ledger or MovableLedger(SlotLedger(allocation.seats, slots, accelerator or "GPU"))
        self.are_held = True
        self._probed: set[int] = set()

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """All bundles, ordered by (node, device index)."""
        return self._ledger.bundles

    def bundle_at(self, group: int, bundle: int) -> Bundle:
        """The bundle at an index within a placement group.

        Raises:
            ValueError: There is none.
        """
        try:
            seat = self._allocation.places.index((group, bundle))
        except ValueError:
            raise ValueError(f"there is no bundle {bundle} in placement group {group}") from None
        return self._ledger.seated([seat])[0]

    def seats(self, indices: Sequence[int] | None) -> Collection[int] | None:
        """The seats of some bundles; None stands for all.

        Raises:
            ValueError: An index is out of range or repeated.
        """
        return None if indices is None else self._ledger.seats(indices)

    def seated(self, seats: Collection[int] | None) -> Sequence[Bundle]:
        """The bundles on some seats; None stands for all."""
        return self.bundles if seats is None else self._ledger.seated(tuple(seats))

    def claim(
        self,
        indices: Sequence[int] | None,
        holder: str,
        check: Callable[[Collection[int]], object] = tuple,
    ) -> LedgerClaim:
        """Take one slot on each named bundle (all of them for None) for `holder`.

        The claim keeps the cluster that `check` belongs to from being forgotten; that is called with seats.
        A claim that is itself forgotten is given back.

        Raises:
            ValueError: An index is out of range or repeated.
            BundlesOccupiedError: A bundle has no free slot; says who holds them.
            ClusterError: Some bundles of a node were named, and its bundles did not tell their devices.
        """
        if indices is not None:
            self._settle(indices)
        slot = self._ledger.take(indices, holder)
        try:
            held = partial(getattr, self, "are_held")
            return LedgerClaim(self._ledger, slot, self._strategy_of, check, held, self._ask)
        except BaseException:
            self._ledger.release(slot.token)
            raise

    def _settle(self, indices: Sequence[int]) -> None:
        """Learn the devices of nodes of which only some bundles are named: their order decides which."""
        named = set(self._ledger.seats(indices))
        self._ask(self._ledger.unknown_seats(partly=named))

    def _ask(self, asked: Collection[int]) -> None:
        """Learn the devices of some seats, where they are not known and were not asked for before."""
        where = tuple(set(asked) - self._probed)
        known = zip(where, self._ledger.seated(where), strict=True)
        seats = {seat for seat, bundle in known if bundle.device_index is None}
        accelerator = self._accelerator or ""
        held = [one.resources.get(accelerator, 0.0) for one in self._allocation.seats]
        order = sorted(seat for seat in seats if held[seat])
        if not order:
            return
        places = [(self._allocation.groups[g], b) for g, b in (self._allocation.places[s] for s in order)]
        amounts = [share_of(held[seat], self._slots) for seat in order]
        devices = probe_devices(places, accelerator, amounts, _PROBE_S)
        self._probed |= seats
        self._ledger.learn({seat: d for seat, d in zip(order, devices, strict=True) if d is not None})

    def _strategy_of(self, seat: int) -> PlacementGroupSchedulingStrategy:
        group, bundle = self._allocation.places[seat]
        return PlacementGroupSchedulingStrategy(
            self._allocation.groups[group],
            placement_group_bundle_index=bundle,
            placement_group_capture_child_tasks=False,
        )

    def check_nodes(self, name: str, seats: Collection[int] | None = None) -> None:
        """Make sure that all nodes are alive, or those that some seats are on.

        Raises:
            NodeLostError: One is gone; says which, and how many bundles the cluster of this name has lost.
        """
        live = _ray.live_node_ids()
        if all(bundle.node_id in live for bundle in self.seated(seats)):
            return
        lost = [bundle for bundle in self.bundles if bundle.node_id not in live]
        nodes = {bundle.node_id: f"{bundle.node_address} ({bundle.node_id[:8]})" for bundle in lost}
        raise NodeLostError(
            f"{name!r} lost {len(lost)} of {len(self.bundles)} bundles: "
            f"node {', '.join(nodes.values())} is gone. Shut the cluster down and create it anew.",
            list(nodes),
        )

    def check_groups(self, seats: Collection[int] | None = None) -> None:
        """Make sure that nobody removed a placement group, or one of those that some seats are in.

        Raises:
            BundlesLostError: Somebody did; says which bundles were on it.
        """
        groups, places = self._allocation.groups, self._allocation.places
        asked = range(len(groups)) if seats is None else sorted({places[seat][0] for seat in seats})
        gone = {asked[position] for position in _ray.gone_groups([groups[one] for one in asked])}
        if not gone:
            return
        lost = [seat for seat, (group, _) in enumerate(places) if group in gone]
        indices = sorted(bundle.index for bundle in self._ledger.seated(lost))
        raise BundlesLostError(
            f"{len(gone)} of {len(groups)} placement groups were removed by somebody else, "
            f"and with them the bundles {indices}. Shut the cluster down and create it anew.",
            indices,
        )

    def release_holder(self, holder: str) -> int:
        """Give back all slots of a holder; return how many claims that were."""
        return self._ledger.release_holder(holder)

    def holders(self) -> dict[int, tuple[str, ...]]:
        """Who holds slots, by bundle index; bundles that nobody holds are left out."""
        return self._ledger.holders()

    def close(self) -> None:
        """End what other processes share; for the owner."""
        self._ledger.close()

    def __reduce__(self) -> tuple[type, tuple[Allocation, int, str | None, MovableLedger]]:
        """Travel to another process of the same Ray cluster, which then shares the slots with this one."""
        return type(self), (self._allocation, self._slots, self._accelerator, self._ledger)
