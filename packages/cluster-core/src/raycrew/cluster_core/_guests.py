"""Who works on a cluster's bundles, as other packages tell: entry points of the group `raycrew.occupants`.

Each is a function of the seconds that it may take. It gives groups as they are told by `--json`: of each its
`name`, `states` (ranks by what they are up to) and `workers`, each of which has a `rank`, `state`, `node_id`,
`private_bytes`, `placement_group` (Ray's id) and `placement_bundle`, and whatever else there is to tell.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

GROUP = "raycrew.occupants"

Report = Mapping[str, Any]
Look = Callable[[float], Sequence[Report]]


def occupants(timeout_s: float) -> tuple[list[Report], list[str]]:
    """All groups that any package tells of, and why some could not tell."""
    found: list[Report] = []
    problems: list[str] = []
    for entry in sorted(entry_points(group=GROUP), key=lambda one: one.name):
        try:
            look: Look = entry.load()
            found += look(timeout_s)
        except Exception as error:  # noqa: BLE001 - whatever one package does, the cluster is told of
            problems.append(f"{_package(entry)} can't tell who works here: {type(error).__name__}: {error}")
    return found, problems


def _package(entry: EntryPoint) -> str:
    return entry.value if entry.dist is None else entry.dist.name
