"""Asking bundles which physical device they hold: only a process inside a bundle can tell."""

import os
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raycrew.cluster_core._devices.binding import bind_device
from raycrew.cluster_core._ray import cancel_tasks, check_connected, start_tasks
from raycrew.cluster_core.errors import ClusterError

# Of these Ray knows which device it gives to whom; any other resource is only a number.
RESOURCES_WITH_DEVICES = frozenset(
    {"GPU", "NPU", "TPU", "HPU", "neuron_cores", "RBLN", "FURIOSA", "TTNPU", "MBLT"}
)


def probe_devices(
    places: Sequence[tuple[PlacementGroup, int]], resource: str, amount: float, timeout_s: float
) -> list[int | None]:
    """Run one short task in each bundle and return the physical device that it was given.

    Args:
        places: Placement group and bundle index there.
        resource: Name of the accelerator's resource.
        amount: How much of it each task asks for; the bundle must have that much left.
        timeout_s: Deadline for all of them together.

    Raises:
        ClusterError: Not every bundle answered in time.
        GetTimeoutError: Ray's control service does not answer.
    """
    if resource not in RESOURCES_WITH_DEVICES:
        return [None] * len(places)
    asked: dict[str, Any] = {"num_gpus": amount} if resource == "GPU" else {"resources": {resource: amount}}
    strategies = [
        PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        for group, bundle in places
    ]
    session = check_connected()
    refs = start_tasks(_device_here, [{**asked, "scheduling_strategy": one} for one in strategies])
    try:
        devices: list[int | None] = session.get(refs, timeout=timeout_s)
    except RayError as error:
        cancel_tasks(refs, session)
        raise ClusterError(
            f"{len(refs)} bundles were asked which {resource} they hold, and not all answered: {error}"
        ) from error
    return devices


def _device_here() -> int | None:
    assigned = ray.get_runtime_context().get_accelerator_ids()
    return bind_device(assigned, os.environ).device_index
