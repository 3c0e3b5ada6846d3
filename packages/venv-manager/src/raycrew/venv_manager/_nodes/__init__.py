"""The same environments on every node of a cluster."""
