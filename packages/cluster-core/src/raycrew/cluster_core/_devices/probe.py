"""Asking bundles which physical device they hold: only a process inside a bundle can tell."""

import os
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raycrew.cluster_core._devices.binding import bind_device
from raycrew.cluster_core._planning import RESOURCES_WITH_DEVICES
from raycrew.cluster_core._ray import cancel_tasks, check_connected, start_tasks
from raycrew.cluster_core.errors import ClusterError


def probe_devices(
    places: Sequence[tuple[PlacementGroup, int]], resource: str, amounts: Sequence[float], timeout_s: float
) -> list[int | None]:
    """Run one short task in each bundle and return the physical device that it was given.

    Args:
        places: Placement group and bundle index there.
        resource: Name of the accelerator's resource.
        amounts: How much of it each task asks for; the bundle must have that much left. Where it is zero
            there is no task, and no device.
        timeout_s: Deadline for all of them together.

    Raises:
        ClusterError: Not every bundle answered in time.
        GetTimeoutError: Ray's control service does not answer.
    """
    asked = [
        {**_asked(resource, amount), "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle)}
        for (group, bundle), amount in zip(places, amounts, strict=True)
        if amount
    ]
    if resource not in RESOURCES_WITH_DEVICES or not asked:
        return [None] * len(places)
    session = check_connected()
    refs = start_tasks(_device_here, asked)
    try:
        devices = iter(session.get(refs, timeout=timeout_s))
    except BaseException as error:  # Whoever gives it up leaves no task that takes a device later.
        cancel_tasks(refs, session)
        if not isinstance(error, RayError):
            raise
        raise ClusterError(
            f"{len(refs)} bundles were asked which {resource} they hold, and not all answered: {error}"
        ) from error
    return [next(devices) if amount else None for amount in amounts]


def _asked(resource: str, amount: float) -> dict[str, Any]:
    return {"num_gpus": amount} if resource == "GPU" else {"resources": {resource: amount}}


def _device_here() -> int | None:
    assigned = ray.get_runtime_context().get_accelerator_ids()
    return bind_device(assigned, os.environ).device_index
