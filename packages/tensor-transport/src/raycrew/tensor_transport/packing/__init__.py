"""Sequences into bins of a token budget, and bins onto ranks."""

from raycrew.tensor_transport.packing._bins import ALGORITHMS, Packing, balance, pack

__all__ = ["ALGORITHMS", "Packing", "balance", "pack"]
