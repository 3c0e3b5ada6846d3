"""The errors of this package, a tree under `ClusterError`."""


class ClusterError(Exception):
    """Base of every error that this package raises on its own account."""
