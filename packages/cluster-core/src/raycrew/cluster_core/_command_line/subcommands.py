"""Subcommands of `raycrew` that other installed packages bring: entry points of the group `raycrew.commands`.

Those of the group `raycrew.cluster_commands` look at a running cluster; see `commands`. Each has the
subcommand's name and is a function of its arguments and of what it is called, as in
`main(["--json"], "raycrew groups")`, which returns an exit code. The first line of its docstring says what it
does.
"""

import functools
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points

from raycrew.cluster_core.errors import ClusterError

GROUP, CLUSTER_GROUP = "raycrew.commands", "raycrew.cluster_commands"
OWN = frozenset({"doctor", "grid", "plan", "run", "status"})  # Nobody else's, whatever they bring.

Subcommand = Callable[[Sequence[str], str], int]


@functools.cache
def brought() -> dict[str, EntryPoint]:
    """What other packages bring, by name."""
    both = (*entry_points(group=GROUP), *entry_points(group=CLUSTER_GROUP))
    found = (entry for entry in both if entry.name not in OWN)
    return {entry.name: entry for entry in sorted(found, key=lambda one: one.name)}


def looks_at_a_cluster(name: str) -> bool:
    """Whether a subcommand is to be loaded only once the token of its cluster is presented."""
    return brought()[name].group == CLUSTER_GROUP


def load(name: str) -> Subcommand:
    """The function of a subcommand.

    Raises:
        ClusterError: It can't be loaded.
    """
    entry = brought()[name]
    try:
        found: Subcommand = entry.load()
    except Exception as error:
        raise ClusterError(
            f"the subcommand {name!r} of {_package(entry)} can't be loaded: {type(error).__name__}: {error}"
        ) from error
    return found


def summary(name: str) -> str:
    """What a subcommand does, in a line."""
    try:
        return (load(name).__doc__ or "").strip().partition("\n")[0].rstrip(".")
    except ClusterError as error:
        return str(error)


def _package(entry: EntryPoint) -> str:
    return entry.value if entry.dist is None else entry.dist.name
