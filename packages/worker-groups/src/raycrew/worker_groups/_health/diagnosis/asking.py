"""Asking the watches of all nodes about workers, with one deadline for all of it."""

from collections.abc import Mapping, Sequence
from typing import Any

from raycrew.worker_groups._health.diagnosis.parts import Findings, Wanted
from raycrew.worker_groups._health.questions import UnansweredError, ask, by_node
from raycrew.worker_groups.sharding import WorkerFacts

ALL_BYTES = 256 << 20  # that are told of all together: they come by the object store, into one memory
_PART = 0.8  # of the time, for the nodes' own work; the rest is for their answers' way


def examine(
    workers: Mapping[int, WorkerFacts],
    prefixes: Mapping[int, Sequence[str]],
    wanted: Wanted,
    timeout_s: float,
) -> dict[int, Findings]:
    """What the watches find of some workers, by rank; each is told of, or why it can't be, after `timeout_s`.

    Args:
        workers: By rank; those that stand by under numbers below 0.
        prefixes: Where the recorder of a rank's collectives was told to write, as far as that is known.
        wanted: What is wanted of each.
        timeout_s: For all of it.
    """
    details = {
        rank: {
            **_details(rank, facts, prefixes.get(rank, ()), wanted),
            "share_bytes": ALL_BYTES // len(workers),
        }
        for rank, facts in workers.items()
    }
    patience_s = timeout_s * (1 - _PART)
    answers = ask("examine", workers, timeout_s * _PART, details=details, patience_s=patience_s)
    found: dict[int, Findings] = {}
    for node_id, ranks in by_node(workers).items():
        answer = answers[node_id]
        if isinstance(answer, UnansweredError):
            found |= {rank: Findings.nothing(str(answer)) for rank in ranks}
        else:
            found |= {rank: Findings.of(told) for rank, told in zip(ranks, answer, strict=True)}
    return dict(sorted(found.items()))


def _details(rank: int, facts: WorkerFacts, prefixes: Sequence[str], wanted: Wanted) -> dict[str, Any]:
    details: dict[str, Any] = {"stacks": wanted.stacks}
    if wanted.lines is not None:
        details |= {"log_paths": facts.log_paths, "lines": wanted.lines}
    if wanted.records and rank >= 0:
        details |= {"rank": rank, "prefixes": list(prefixes)}
    return details
