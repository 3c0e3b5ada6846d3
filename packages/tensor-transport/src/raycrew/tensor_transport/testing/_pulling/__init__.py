"""What every `PullTransport` promises: alone, between processes, and when one of them is interrupted."""

from raycrew.tensor_transport.testing._pulling.case import PullCase

__all__ = ["PullCase"]
