"""How requests reach a queue, in this process or in an actor, and who waits there until one is possible."""

from raycrew.worker_groups.rollouts.samples._channels.local import Channel, LocalChannel
from raycrew.worker_groups.rollouts.samples._channels.remote import RayChannel

__all__ = ["Channel", "LocalChannel", "RayChannel"]
