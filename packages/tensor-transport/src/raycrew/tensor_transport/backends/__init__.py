"""Ways to keep tensors, one module each."""

from raycrew.tensor_transport.backends._ledger import Ledger

__all__ = ["Ledger"]
