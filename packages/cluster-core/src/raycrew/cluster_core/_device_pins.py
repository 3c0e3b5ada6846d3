"""Getting particular devices from Ray, which takes no such wishes.

All free devices of a node are taken one by one, the wanted ones are let go, and what is then asked for on
that node can only be given these. The rest is let go at the end. A device of somebody else is never touched.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from ray.util.placement_group import PlacementGroup

from raycrew.cluster_core import _ray_compat
from raycrew.cluster_core._probe import probe_devices


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
                _ray_compat.remove_group(self._held[node_id].pop(device))


@contextlib.contextmanager
def held_devices(
    free: Mapping[str, int], accelerator: str, name: str, left: Callable[[], float]
) -> Iterator[HeldDevices]:
    """Hold all free devices of some nodes, and find out which they are.

    Args:
        free: How many devices are free on each node, by node id.
        accelerator: Name of their resource.
        name: Start of the names of the placement groups.
        left: Seconds left.
    """
    groups: list[PlacementGroup] = []
    nodes = [node_id for node_id, count in free.items() for _ in range(count)]
    try:
        for i, node_id in enumerate(nodes):
            pin = {_ray_compat.NODE_ID_LABEL: node_id}
            groups.append(_ray_compat.create_group([{accelerator: 1.0}], "PACK", f"{name}-hold{i}", [pin]))
        # What was given to somebody else meanwhile is not waited for.
        granted = [_ray_compat.await_group(group, min(2.0, left())) for group in groups]
        mine = [i for i, got in enumerate(granted) if got]
        devices = probe_devices([(groups[i], 0) for i in mine], accelerator, 1.0, max(left(), 1.0))
        held: dict[str, dict[int, PlacementGroup]] = {node_id: {} for node_id in free}
        for i, device in zip(mine, devices, strict=True):
            if device is not None:
                held[nodes[i]][device] = groups[i]
        yield HeldDevices(held)
    finally:
        for group in groups:
            _ray_compat.remove_group(group)
