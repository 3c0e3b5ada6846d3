"""Who works on a cluster's bundles, as other packages tell: entry points of the group `raycrew.occupants`.

Each is a function of the seconds that it may take. It gives groups as they are told by `--json`: of each its
`name`, `states` (ranks by what they are up to) and `workers`, each of which has a `rank`, `state`, `node_id`,
`private_bytes`, `placement_group` (Ray's id) and `placement_bundle`, and whatever else there is to tell.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

GROUP = "raycrew.occupants"
_REPORTED = {"name", "states", "workers"}
_WORKER_REPORTED = {"rank", "state", "private_bytes", "placement_group", "placement_bundle"}

Report = Mapping[str, Any]
Look = Callable[[float], Sequence[Report]]


def occupants(timeout_s: float) -> tuple[list[Report], list[str]]:
    """All groups that any package tells of, and why some could not tell."""
    found: list[Report] = []
    problems: list[str] = []
    for entry in sorted(entry_points(group=GROUP), key=lambda one: one.name):
        try:
            look: Look = entry.load()
            found += _complete(look(timeout_s))
        except Exception as error:  # noqa: BLE001 - whatever one package does, the cluster is told of
            problems.append(f"{_package(entry)} can't tell who works here: {type(error).__name__}: {error}")
    return found, problems


def _complete(reports: Sequence[Report]) -> list[Report]:
    """Reports that say all that is shown of them.

    Raises:
        ValueError: One does not.
    """
    for report in reports:
        lacking = _REPORTED - report.keys()
        lacking |= {key for worker in report.get("workers", ()) for key in _WORKER_REPORTED - worker.keys()}
        if lacking:
            raise ValueError(f"its report has no {', '.join(sorted(lacking))}")
    return list(reports)


def _package(entry: EntryPoint) -> str:
    return entry.value if entry.dist is None else entry.dist.name
