"""Getting particular devices from Ray, which takes no such wishes.

All free devices of a node are taken one by one, the wanted ones are let go, and what is then asked for on
that node can only be given these. The rest is let go at the end. A device of somebody else is never touched.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from ray.util.placement_group import PlacementGroup

from raycrew.cluster_core import _ray
from raycrew.cluster_core._devices.probe import probe_devices

_HOLD_S = 1.5  # Devices that were freed just before take Ray about a second to grant, more on a busy machine.
_LONGEST_HOLD_S = 12.0


class DevicesTakenError(Exception):
    """A wanted device is not among the free ones of a node.

    Attributes:
        node_id: Ray id of the node.
    """

    def __init__(self, message: str, node_id: str) -> None:
        super().__init__(message)
        self.node_id = node_id


class HeldDevices:
    """The free devices of some nodes, each held by a placement group of its own."""

    def __init__(self, held: Mapping[str, dict[int, PlacementGroup]]) -> None:
        self._held = held

    def let_go(self, wanted: Mapping[str, Sequence[int]]) -> None:
        """Free the wanted devices of each node, or none of them.

        Raises:
            DevicesTakenError: Somebody else holds one.
        """
        for node_id, devices in wanted.items():
            missing = sorted(set(devices) - self._held[node_id].keys())
            if missing:
                raise DevicesTakenError(
                    f"devices {missing} of node {node_id[:8]} are not free, "
                    f"{sorted(self._held[node_id])} are",
                    node_id,
                )
        for node_id, devices in wanted.items():
            for device in devices:
                _ray.remove_group(self._held[node_id].pop(device))


@contextlib.contextmanager
def held_devices(
    devices: Mapping[str, int], accelerator: str, name: str, left: Callable[[], float], attempt: int = 1
) -> Iterator[HeldDevices]:
    """Hold all free devices of some nodes, and find out which they are.

    Args:
        devices: How many devices each node has free, by node id.
        accelerator: Name of their resource.
        name: Start of the names of the placement groups.
        left: Seconds left.
        attempt: Which attempt this is, from 1: later ones give Ray longer to grant what is free.
    """
    groups: list[PlacementGroup] = []
    nodes = [node_id for node_id, count in devices.items() for _ in range(count)]
    try:
        for i, node_id in enumerate(nodes):
            pin = {_ray.NODE_ID_LABEL: node_id}
            groups.append(_ray.create_group([{accelerator: 1.0}], "PACK", f"{name}-hold{i}", [pin]))
        # What somebody else holds is never granted, and must not be once the wanted devices are let go.
        end = time.monotonic() + min(_HOLD_S * 2 ** (attempt // 3), _LONGEST_HOLD_S, left())
        granted = [_ray.await_group(group, max(end - time.monotonic(), 0.05)) for group in groups]
        for group, got in zip(groups, granted, strict=True):
            if not got:
                _ray.withdraw_group(group)
        mine = [i for i, got in enumerate(granted) if got]
        found = probe_devices(
            [(groups[i], 0) for i in mine], accelerator, [1.0] * len(mine), max(left(), 1.0)
        )
        held: dict[str, dict[int, PlacementGroup]] = {node_id: {} for node_id in devices}
        for i, device in zip(mine, found, strict=True):
            if device is not None:
                held[nodes[i]][device] = groups[i]
        yield HeldDevices(held)
    finally:
        _ray.withdraw_groups(groups)
