"""The errors of this package, a tree under `ClusterError`."""

from collections.abc import Mapping, Sequence
from typing import Any

_AGAIN = (
    " If the same lines run again, as a cell of a notebook does: the {!r} before lives for as long as a name "
    "is bound to it, and the new one is made before the name changes hands. End the one before by its "
    "shutdown(), or use `with`."
)


class ClusterError(Exception):
    """Base of every error that this package raises on its own account."""


class ClusterClosedError(ClusterError):
    """A cluster, or what belongs to it, was used after its shutdown or after the connection to Ray ended."""


class ResourceInsufficientError(ClusterError):
    """The running Ray cluster can't hold what was asked for.

    Attributes:
        reasons: One line per node (or per part of the request) that says what was needed, what is free
            and who holds the rest.
    """

    def __init__(self, message: str, reasons: Sequence[str] = ()) -> None:
        super().__init__("\n  ".join([message, *reasons]))
        self.message = message
        self.reasons = tuple(reasons)

    def __reduce__(self) -> tuple[type, tuple[str, tuple[str, ...]]]:
        return type(self), (self.message, self.reasons)


class InfeasibleRequestError(ResourceInsufficientError):
    """No wait would help: the nodes are too small or too few even when they are empty."""


class AllocationTimeoutError(ResourceInsufficientError, TimeoutError):
    """The request would fit, but was not granted before the deadline."""


class BundlesOccupiedError(ClusterError):
    """A claim asked for bundles that have no free slot.

    Attributes:
        holders: Who holds each of those bundles, by bundle index.
    """

    def __init__(self, holder: str, slots: int, holders: Mapping[int, Sequence[str]]) -> None:
        shown = "; ".join(f"bundle {i}: {', '.join(names)}" for i, names in list(holders.items())[:8])
        more = f"; and {len(holders) - 8} more bundles" if len(holders) > 8 else ""
        super().__init__(
            f"{holder!r} finds no free slot on {len(holders)} bundle(s), each of {slots} slot(s): "
            f"held by {shown}{more}. "
            "Shut a holder down first, or allow more with max_colocated_worker_groups."
            f"{_AGAIN.format(holder) if any(holder in names for names in holders.values()) else ''}"
        )
        self.holder = holder
        self.slots = slots
        self.holders = {index: tuple(names) for index, names in holders.items()}

    def __reduce__(self) -> tuple[type, tuple[str, int, Mapping[int, Sequence[str]]]]:
        return type(self), (self.holder, self.slots, self.holders)


class NodeLostError(ClusterError):
    """A node under a live cluster is gone.

    Attributes:
        node_ids: Ray ids of the lost nodes.
    """

    def __init__(self, message: str, node_ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.node_ids = tuple(node_ids)

    def __reduce__(self) -> tuple[type, tuple[str, tuple[str, ...]]]:
        return type(self), (self.message, self.node_ids)


class BundlesLostError(ClusterError):
    """Placement groups under a live cluster were removed by somebody else.

    Attributes:
        bundle_indices: Indices of the bundles that are gone.
    """

    def __init__(self, message: str, bundle_indices: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.bundle_indices = tuple(bundle_indices)

    def __reduce__(self) -> tuple[type, tuple[str, tuple[int, ...]]]:
        return type(self), (self.message, self.bundle_indices)


class NodeCallError(ClusterError):
    """A function that was run on each node failed on one of them; the cause is its exception there.

    Attributes:
        node_id: Ray id of the node.
    """

    def __init__(self, message: str, node_id: str) -> None:
        super().__init__(message)
        self.message = message
        self.node_id = node_id

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.message, self.node_id)


class NodeCallTimeoutError(NodeCallError, TimeoutError):
    """A function that was run on each node didn't return from one of them before the deadline."""


class PortsExhaustedError(ClusterError):
    """Too few ports of a range are free.

    Attributes:
        port_range: First and last port of the range.
    """

    def __init__(self, message: str, port_range: tuple[int, int]) -> None:
        super().__init__(message)
        self.message = message
        self.port_range = port_range

    def __reduce__(self) -> tuple[type, tuple[str, tuple[int, int]]]:
        return type(self), (self.message, self.port_range)


class ClusterConnectionError(ClusterError, ConnectionError):
    """No connection to a Ray cluster; its subclasses say why.

    Attributes:
        address: Where it was tried; None where no address was known.
    """

    def __init__(self, message: str, address: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.address = address

    def __reduce__(self) -> tuple[type, tuple[str, str | None]]:
        return type(self), (self.message, self.address)


class NoClusterError(ClusterConnectionError):
    """No running cluster was found, or several where one was meant.

    That none was found is all that ever leads to a fresh local one.

    Attributes:
        running: Addresses of the several that were found.
    """

    def __init__(self, message: str, address: str | None = None, running: tuple[str, ...] = ()) -> None:
        super().__init__(message, address)
        self.running = running

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.message, self.address, self.running)


class ClusterUnreachableError(ClusterConnectionError, TimeoutError):
    """Nothing at an address answers as a Ray cluster does."""


class ClusterAuthenticationError(ClusterConnectionError):
    """A cluster answers and refuses this process's token."""
