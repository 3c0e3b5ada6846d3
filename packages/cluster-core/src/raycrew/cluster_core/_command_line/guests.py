"""Who works on a cluster's bundles, as other packages tell: entry points of the group `raycrew.occupants`.

Each is a function of the seconds that it may take. It gives groups as they are told by `--json`: of each its
`name`, `states` (ranks by what they are up to) and `workers`, each of which has a `rank`, `state`, `node_id`,
`private_bytes`, `placement_group` (Ray's id) and `placement_bundle`, and whatever else there is to tell; a
`note` says what a group as a whole is at that does not work yet, and `standbys` are the same of workers
without a rank.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycrew.cluster_core.doctor import Finding

GROUP = "raycrew.occupants"
_AMISS = {"stopped", "silent", "dead", "unanswered"}
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


def check_occupants(groups: Sequence[Report], problems: Sequence[str] = ()) -> "Finding":
    """Whether groups are still starting, or have ranks that do not work.

    Args:
        groups: What there is to tell of each.
        problems: Why others can't be told of.
    """
    from raycrew.cluster_core.doctor import Finding  # which imports Ray

    wrong = [f"{group['name']}: {said}" for group in groups for said in _complaints(group)]
    if wrong or problems:
        advice = "`raycrew groups` shows each rank, `raycrew stacks` where its threads are." if wrong else ""
        return Finding("worker groups", "doubtful", "; ".join([*wrong, *problems]), advice)
    if not groups:
        return Finding("worker groups", "skipped", "there is none")
    n_ranks = sum(sum(group["states"].values()) for group in groups)
    return Finding("worker groups", "good", f"{len(groups)} with {n_ranks} ranks, none starting or amiss")


def _complaints(group: Report) -> list[str]:
    amiss = [f"{count} {state}" for state, count in group["states"].items() if state in _AMISS]
    return [said for said in (group.get("note"), ", ".join(amiss)) if said]


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
