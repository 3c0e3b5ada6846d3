"""The search for places of bundles that differ, or whose nodes have an order: parts, rooms, and all ways."""

from raycrew.cluster_core._planning.searching.parts import lay_parts

__all__ = ["lay_parts"]
