"""Ports that stay taken between being chosen and being used, here and on the nodes of a cluster."""
