"""How buckets get from publishers to receivers, as all of them were told."""

from raycrew.tensor_transport.weights._routing.route import Place, Route
from raycrew.tensor_transport.weights._routing.store import RouteStore

__all__ = ["Place", "Route", "RouteStore"]
