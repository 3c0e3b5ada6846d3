"""What every `BroadcastTransport` promises, and what the members of a group run while it is checked."""

from raycrew.tensor_transport.testing._broadcasting.checks import BroadcastCase, BroadcastPeer

__all__ = ["BroadcastCase", "BroadcastPeer"]
