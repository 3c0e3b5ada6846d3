"""How many processes of the pool work on each node."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Shares:
    """How many processes work on each node, and whether they have CPUs of their own."""

    slots: Mapping[str, int]
    claimed: bool


def share_out(cpus: Mapping[str, tuple[float, float]], limit: int | None) -> Shares:
    """One process per free CPU; where none is free at all, one per CPU, without a claim on it.

    Whoever holds all the CPUs is then most likely waiting for the results.

    Args:
        cpus: Free and total CPUs by node id.
        limit: Most processes altogether; they are spread over as many nodes as possible.
    """
    wanted = {node: int(free) for node, (free, _) in cpus.items() if free >= 1}
    claimed = bool(wanted)
    if not claimed:
        wanted = {node: max(int(total), 1) for node, (_, total) in cpus.items() if total > 0}
    wanted = wanted or dict.fromkeys(cpus, 1)
    if limit is None or limit >= sum(wanted.values()):
        return Shares(wanted, claimed)
    given = dict.fromkeys(wanted, 0)
    while limit:
        for node, want in wanted.items():
            if limit and given[node] < want:
                given[node] += 1
                limit -= 1
    return Shares({node: slots for node, slots in given.items() if slots}, claimed)
