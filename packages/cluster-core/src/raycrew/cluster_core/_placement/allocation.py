"""Placement groups from a plan: create, wait, explain, remove."""

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from raycrew.cluster_core import _ray
from raycrew.cluster_core._devices import DevicesTakenError, held_devices, probe_devices
from raycrew.cluster_core._placement.returning import Returning
from raycrew.cluster_core._placement.wanted import Wanted, devices_of, unplaced_group, wanted_groups
from raycrew.cluster_core._planning import (
    Bundle,
    NodeState,
    PlacementPlan,
    PlacementRequest,
    explain_request,
    plan_cluster,
)
from raycrew.cluster_core._ray import holders_by_node, node_states
from raycrew.cluster_core.errors import (
    AllocationTimeoutError,
    ClusterError,
    InfeasibleRequestError,
    ResourceInsufficientError,
)

logger = logging.getLogger(__name__)

_FIRST_WINDOW_S = 3.0  # Freed resources take Ray up to a second to grant again.
_POLL_S = 0.25
_SLOWEST_POLL_S = 2.0
_SETTLED_S = 2.0  # By then a device is counted as free whose holder was killed.
_LOOK_S = 0.05
_DEMAND_S = 30.0  # So long an autoscaler sees what is missing before the cluster is looked at again.

_returning = Returning()


@dataclass(frozen=True, slots=True)
class Allocation:
    """Granted placement groups and the bundles in them.

    Attributes:
        groups: The placement groups in node order, one per node with bundles, or a single one.
        seats: The bundles in allocation order.
        places: For each seat, which group it is in and its bundle index there.
    """

    groups: tuple[PlacementGroup, ...]
    seats: tuple[Bundle, ...]
    places: tuple[tuple[int, int], ...]

    def remove(self) -> None:
        """Remove all groups; idempotent."""
        _ray.withdraw_groups(self.groups)

    def give_back(self) -> None:
        """Remove all groups, and let the next allocation of this process see what they held as free."""
        try:
            _returning.note(node_states(), self.seats)
        except (ClusterError, RayError) as error:
            logger.debug("the next allocation may lie elsewhere: %s", error)
        finally:
            self.remove()


class Allocator:
    """Gets the placement groups of one request, within one deadline.

    Args:
        request: What is asked for.
        alias: Readable start of the names of the groups.
        unified: One placement group for all logical nodes.
        gpu_ids: Physical devices per logical node, "auto" to learn which were granted, or None.
        accelerator: Resource name of these devices.
        timeout_s: Deadline for everything together.
        max_retries: How often groups are created anew after Ray failed to grant them.
        census: Where the nodes come from.
        clock: Monotonic seconds.
        sleep: Waits some seconds.
    """

    def __init__(
        self,
        request: PlacementRequest,
        *,
        alias: str,
        unified: bool = False,
        gpu_ids: Literal["auto"] | tuple[tuple[int, ...], ...] | None = None,
        accelerator: str = "GPU",
        timeout_s: float = 180.0,
        max_retries: int = 6,
        census: Callable[[str], list[NodeState]] = node_states,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._request = request
        self._name = f"{alias}-{uuid.uuid4().hex[:8]}"
        self._unified = unified
        self._gpu_ids, self._accelerator = gpu_ids, accelerator
        self._passed_over: set[str] = set()  # Nodes where a wanted device was not free a moment ago.
        self._tried: set[str] = set()  # Nodes where it ever was not.
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._census = census
        self._clock = clock
        self._sleep = sleep
        self._deadline = 0.0
        self._doubts: list[str] = []  # Why Ray may never grant what fits.

    def allocate(self) -> Allocation:
        """Plan, create and wait until everything is granted; on any failure nothing is left behind.

        Raises:
            InfeasibleRequestError: The request would not fit if the cluster were empty.
            AllocationTimeoutError: It was not granted before the deadline.
            ResourceInsufficientError: Ray failed to grant it more than `max_retries` times.
            ClusterClosedError: The connection to Ray ended meanwhile.
            asyncio.CancelledError: This is within an `until_set` whose event was set.
        """
        self._deadline = self._clock() + self._timeout_s
        self._session = _ray.check_connected()
        failed = number = 0
        while True:
            number += 1
            try:
                nodes, plan = self._await_plan()
                return self._grant(nodes, plan, number)
            except DevicesTakenError as error:
                failed += error.node_id in self._tried  # The first look at a node is no failure.
                self._tried.add(error.node_id)
                self._passed_over.add(error.node_id)
                problem = str(error)
            except (_NotGrantedError, RayError) as error:
                failed += 1
                problem = f"{type(error).__name__}: {error}" if isinstance(error, RayError) else str(error)
            logger.warning(
                "%s: attempt %d failed: %s", self._name, number, "; ".join([problem, *self._doubts])
            )
            if self._left() <= 0:
                raise AllocationTimeoutError(
                    f"{self._name} was not granted within {self._timeout_s:g} s:",
                    [problem, *self._doubts, *self._reasons_now()],
                )
            if failed > self._max_retries:
                raise ResourceInsufficientError(
                    f"{self._name} was not granted in {number} attempts, the last:", [problem, *self._doubts]
                )
            if self._passed_over:  # What this attempt held is free again only after a while.
                self._sleep(min(_SETTLED_S, max(self._left(), 0.0)))

    def _left(self) -> float:
        return self._deadline - self._clock()

    def _await_plan(self) -> tuple[list[NodeState], PlacementPlan]:
        """Wait until the request fits into what is free."""
        pause, said, start = _POLL_S, False, self._clock()
        while True:
            nodes = self._look()
            if not _returning.settled(nodes) and self._left() > 0:
                self._sleep(_LOOK_S)
                continue
            plan = plan_cluster(self._not_passed_over(nodes), self._request)
            if plan.feasible:
                return nodes, plan
            if self._clock() - start > _SETTLED_S:
                self._passed_over.clear()
            more_may_come = _ray.autoscaler_is_running()
            if plan.impossible and (more_may_come is False or (more_may_come is None and self._left() <= 0)):
                raise InfeasibleRequestError(
                    f"{self._name} can never fit into this cluster:", self._reasons(nodes)
                )
            if self._left() <= 0:
                raise AllocationTimeoutError(
                    f"{self._name} did not fit within {self._timeout_s:g} s:", self._reasons(nodes)
                )
            if not said:
                logger.warning("%s waits for room: %s", self._name, "; ".join(self._reasons(nodes)))
                said = True
            if more_may_come:
                self._demand()
            self._sleep(min(pause, max(self._left(), 0.0)))
            pause = min(pause * 1.5, _SLOWEST_POLL_S)

    def _look(self) -> list[NodeState]:
        _ray.Session.check_wanted()
        self._session.check()
        return self._census(self._request.domain_label)

    def _not_passed_over(self, nodes: list[NodeState]) -> list[NodeState]:
        """The nodes, with no room on those that are passed over."""
        over = self._passed_over
        return [replace(n, free=dict.fromkeys(n.free, 0.0)) if n.node_id in over else n for n in nodes]

    def _reasons(self, nodes: list[NodeState]) -> tuple[str, ...]:
        return explain_request(nodes, self._request, holders_by_node(nodes))

    def _reasons_now(self) -> tuple[str, ...]:
        try:
            return self._reasons(self._look())
        except RayError as error:
            return (f"Ray does not tell what is free: {type(error).__name__}: {error}",)

    def _demand(self) -> None:
        """Show an autoscaler what is missing, by groups that name no node and are gone again afterwards."""
        groups: list[PlacementGroup] = []
        try:
            for node, count in enumerate(self._request.bundle_counts):
                if count:
                    groups.append(self._create(unplaced_group(self._name, self._request, node)))
            end = self._clock() + min(_DEMAND_S, self._left())
            for group in groups:
                _ray.await_group(group, end - self._clock())
        finally:
            _ray.withdraw_groups(groups)

    def _create(self, wanted: Wanted) -> PlacementGroup:
        pins = [self._request.selector_of(node) for node in wanted.node_indices]
        if wanted.node_ids:  # The plan is the truth: each bundle is pinned to its node.
            pins = [
                {**pin, _ray.NODE_ID_LABEL: node} for pin, node in zip(pins, wanted.node_ids, strict=True)
            ]
        return _ray.create_group(wanted.bundles, wanted.strategy, wanted.name, pins)

    def _grant(self, nodes: list[NodeState], plan: PlacementPlan, number: int) -> Allocation:
        self._doubts = [plan.doubt] if plan.doubt else []
        suffix = f"-try{number}" if number > 1 else ""
        wanted = [
            replace(one, name=one.name + suffix)
            for one in wanted_groups(self._name, self._request, plan, unified=self._unified)
        ]
        groups: list[PlacementGroup] = []
        try:
            window = self._clock() + min(_FIRST_WINDOW_S * 2 ** min(number - 1, 10), max(self._left(), 0.05))
            if isinstance(self._gpu_ids, tuple):
                self._create_on_devices(wanted, nodes, groups, self._gpu_ids, number)
            else:
                groups.extend(self._create(one) for one in wanted)
                for group in groups:
                    self._await(group, window)
            allocation = _allocation(groups, wanted, nodes)
            return allocation if self._gpu_ids is None else self._with_devices(allocation)
        except BaseException:
            _ray.withdraw_groups(groups)
            raise

    def _create_on_devices(
        self,
        wanted: list[Wanted],
        nodes: list[NodeState],
        groups: list[PlacementGroup],
        gpu_ids: tuple[tuple[int, ...], ...],
        number: int,
    ) -> None:
        """Create each group while only its own devices are free on its nodes."""
        planned = {node_id for one in wanted for node_id in one.node_ids}
        devices = {n.node_id: int(n.free.get(self._accelerator, 0)) for n in nodes if n.node_id in planned}
        with held_devices(devices, self._accelerator, wanted[0].name, self._left, number) as held:
            for one in wanted:
                held.let_go(devices_of(one, gpu_ids))
                groups.append(self._create(one))
                self._await(groups[-1], self._clock() + min(_FIRST_WINDOW_S, max(self._left(), 0.05)))

    def _with_devices(self, allocation: Allocation) -> Allocation:
        """Learn which devices were granted, and make sure that they are the wanted ones.

        Each logical node of a list of devices lies on one physical node.
        """
        places = [(allocation.groups[group], bundle) for group, bundle in allocation.places]
        amounts = [seat.resources.get(self._accelerator, 0.0) for seat in allocation.seats]
        devices = probe_devices(places, self._accelerator, amounts, max(self._left(), 1.0))
        seats = tuple(
            replace(seat, device_index=d) for seat, d in zip(allocation.seats, devices, strict=True)
        )
        if isinstance(self._gpu_ids, tuple):
            granted = sorted((seat.node_index, seat.device_index) for seat in seats)
            asked = sorted((node, d) for node, ids in enumerate(self._gpu_ids) for d in ids)
            if granted != asked:
                raise _NotGrantedError(f"Ray granted the (node, device) pairs {granted} instead of {asked}")
        return replace(allocation, seats=seats)

    def _await(self, group: PlacementGroup, window: float) -> None:
        while not _ray.await_group(group, min(1.0, max(window - self._clock(), 0.05))):
            _ray.Session.check_wanted()
            state = _ray.group_state(group)
            if state.state in ("REMOVED", "UNKNOWN"):
                raise _NotGrantedError(f"placement group {state.name} was removed while it was waited for")
            if state.scheduling_state == "INFEASIBLE":
                raise _NotGrantedError(f"a node that {state.name} was planned on is gone, or leaves")
            if self._clock() >= window:
                why = state.scheduling_state.lower() or state.state.lower()
                raise _NotGrantedError(f"placement group {state.name} is not granted yet ({why})")


class _NotGrantedError(Exception):
    """Ray did not grant a group in the time that was set for one attempt."""


def _allocation(groups: list[PlacementGroup], wanted: list[Wanted], nodes: list[NodeState]) -> Allocation:
    """What was granted in any order, in the order of the allocation."""
    addresses = {node.node_id: node.address for node in nodes}
    pairs = sorted(zip(groups, wanted, strict=True), key=lambda pair: min(pair[1].seats))
    places = sorted(
        (seat, group, b) for group, (_, one) in enumerate(pairs) for b, seat in enumerate(one.seats)
    )
    seats = tuple(
        Bundle(seat, one.node_indices[b], one.node_ids[b], addresses[one.node_ids[b]], dict(one.bundles[b]))
        for seat, group, b in places
        for one in [pairs[group][1]]
    )
    return Allocation(tuple(group for group, _ in pairs), seats, tuple((group, b) for _, group, b in places))
