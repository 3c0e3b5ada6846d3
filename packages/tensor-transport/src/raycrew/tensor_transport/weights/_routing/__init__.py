"""How buckets get from publishers to receivers, as all of them were told."""

from raycrew.tensor_transport.weights._routing.route import Device, Place, Route
from raycrew.tensor_transport.weights._routing.store import RouteStore

__all__ = ["Device", "Place", "Route", "RouteStore"]
