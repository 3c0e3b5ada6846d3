"""What a group keeps for ranks that are lost, and where they go."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raycrew.worker_groups._start import Layout, Place, Standby


@dataclass(frozen=True, slots=True)
class Spare:
    """A bundle that a group keeps for a rank that is lost.

    Attributes:
        bundle_index: Which of its cluster's.
        node_id: Ray node id.
        node_address: IP address of the node.
        pid: Process of the worker that stands by on it; None where none does, or not yet. Whether it still
            lives is asked when it is needed, or by `get_standby_status()`.
    """

    bundle_index: int
    node_id: str
    node_address: str
    pid: int | None = None


@dataclass(slots=True)
class Move:
    """Ranks on their way to other bundles.

    Attributes:
        layout: The group as it is to be.
        places: By position, the bundle that it comes to.
        arrivals: The same positions, and who stands by there; None where nobody does.
        vacated: The bundles that they had, as far as there still are any.
        lost: Those that there are not.
        is_made: Whether the workers are there.
    """

    layout: Layout
    places: Mapping[int, Place] = field(default_factory=dict)
    arrivals: Mapping[int, Standby | None] = field(default_factory=dict)
    vacated: Sequence[Place] = ()
    lost: Sequence[Place] = ()
    is_made: bool = False
