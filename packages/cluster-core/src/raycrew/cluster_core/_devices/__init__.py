"""Devices: which one a process holds and how it addresses it, and getting particular ones from Ray."""

from typing import TYPE_CHECKING

from raycrew.cluster_core._devices.binding import (
    KEEP_FLAGS,
    VISIBILITY_VARIABLES,
    DeviceBinding,
    accelerators_of,
    bind_device,
    visible_devices,
)
from raycrew.cluster_core._ray import lazy

if TYPE_CHECKING:
    from raycrew.cluster_core._devices.pins import DevicesTakenError, held_devices
    from raycrew.cluster_core._devices.probe import probe_devices

__all__ = [
    "KEEP_FLAGS",
    "VISIBILITY_VARIABLES",
    "DeviceBinding",
    "DevicesTakenError",
    "accelerators_of",
    "bind_device",
    "held_devices",
    "probe_devices",
    "visible_devices",
]

__getattr__ = lazy(__name__, {"pins": ["DevicesTakenError", "held_devices"], "probe": ["probe_devices"]})
