"""The end of workers: asked first, killed at the deadline, and over when the process table says so."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError

from raycrew.cluster_core import ClusterClosedError, Session
from raycrew.worker_groups._health.questions import UnansweredError, ask, by_node
from raycrew.worker_groups._ray import await_end, current_session, end_actors, request_exit
from raycrew.worker_groups.errors import WorkerGroupError
from raycrew.worker_groups.sharding import WorkerFacts

logger = logging.getLogger(__name__)

KILL_TIMEOUT_S = 10.0
DEAF_S = 4.0
"""For a node that has just not answered to end workers, and to answer now."""
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of workers that were to end; workers have the keys that the caller gave them.

    Attributes:
        late: Those that did not end by themselves.
        left: Those that are not known to be gone, and why.
        occupied: Whether something may still use their bundles.
        again: Tries once more to end those that are left; None where that is of no use.
    """

    late: tuple[int, ...] = ()
    left: Mapping[int, str] = field(default_factory=dict)
    occupied: bool = False
    again: "Callable[[], Ended] | None" = field(default=None, compare=False, repr=False)

    def once_more(self) -> "Ended":
        """What became of them by now."""
        return self if self.again is None else self.again()

    def renamed(self, keys: Mapping[int, int]) -> "Ended":
        """The same with other keys."""
        late, left = (keys[key] for key in self.late), {keys[key]: why for key, why in self.left.items()}
        return replace(self, late=tuple(late), left=left, again=lambda: self.once_more().renamed(keys))

    def beside(self, others: "Sequence[Ended]") -> "Ended":
        """The same, and what others left."""
        left = {key: why for other in others for key, why in other.left.items()}
        occupied = self.occupied or any(other.occupied for other in others)

        def again() -> Ended:
            return self.once_more().beside([other.once_more() for other in others])

        return replace(self, left={**left, **self.left}, occupied=occupied, again=again)


def end_workers_of(
    session: Session,
    handles: Mapping[int, ActorHandle[Any]],
    facts: Mapping[int, WorkerFacts],
    grace_s: float = 0.0,
    is_enough: Callable[[], bool] = bool,
) -> Ended:
    """The same as `end_workers` for workers of a session, which may have ended or end meanwhile."""
    try:
        if Session.current() == session:
            return end_workers(handles, facts, grace_s, is_enough)
    except (WorkerGroupError, ClusterClosedError, RayError):
        if Session.current() == session:
            raise
    why = "Ray is down already; it ends what it has started, but can't be asked"
    return Ended(left=dict.fromkeys(handles, why))


def end_workers(
    handles: Mapping[int, ActorHandle[Any]],
    facts: Mapping[int, WorkerFacts],
    grace_s: float = 0.0,
    is_enough: Callable[[], bool] = bool,
) -> Ended:
    """End workers with all that they have started.

    Args:
        handles: The workers.
        facts: What is known of their processes; Ray's word is taken for a worker that is missing here.
        grace_s: How long they may take to end by themselves.
        is_enough: Asked now and then whether they have had time enough before that.
    """
    late, deaf, session = list(handles), set[str](), current_session()
    try:
        if grace_s > 0:
            request_exit(list(handles.values()))
            late, deaf = _await_exits(handles, facts, grace_s, is_enough)
    finally:
        end_actors([handles[key] for key in late])
    left, occupied = _kill({key: facts[key] for key in handles if key in facts}, deaf)
    unknown = [key for key in handles if key not in facts]
    stubborn = await_end([handles[key] for key in unknown], KILL_TIMEOUT_S)
    left |= {unknown[i]: "Ray has not ended it" for i in stubborn}
    known = {key: facts[key] for key in left if key in facts}
    again = partial(end_workers_of, session, {key: handles[key] for key in left}, known) if left else None
    return Ended(tuple(late), left, occupied or bool(stubborn), again)


def _await_exits(
    handles: Mapping[int, ActorHandle[Any]],
    facts: Mapping[int, WorkerFacts],
    grace_s: float,
    is_enough: Callable[[], bool],
) -> tuple[list[int], set[str]]:
    """`_await_exit`, asked again while there is time; nobody waits for those whose node is gone."""
    late, lost, deaf, deadline = list(handles), list[int](), set[str](), time.monotonic() + grace_s
    step_s = grace_s if is_enough is bool else _LOOK_S
    while late and not deaf and not is_enough() and (left_s := deadline - time.monotonic()) > 0:
        late, silent = _await_exit({key: handles[key] for key in late}, facts, min(step_s, left_s))
        deaf = {node for node, error in silent.items() if not error.node_is_gone}
        lost += [key for key in late if key in facts and facts[key].node_id in silent.keys() - deaf]
        late = [key for key in late if key not in lost]
    return sorted([*late, *lost]), deaf


def _await_exit(
    handles: Mapping[int, ActorHandle[Any]], facts: Mapping[int, WorkerFacts], grace_s: float
) -> tuple[list[int], dict[str, UnansweredError]]:
    """Those that have not ended by themselves, and the nodes that don't answer."""
    known = {key: facts[key] for key in handles if key in facts}
    nodes, late = by_node(known), [key for key in handles if key not in facts]
    answers = ask("await_exit", known, grace_s)
    for node_id, answer in answers.items():
        positions = range(len(nodes[node_id])) if isinstance(answer, UnansweredError) else answer
        late += [nodes[node_id][position] for position in positions]
    return late, {node: answer for node, answer in answers.items() if isinstance(answer, UnansweredError)}


def _kill(facts: Mapping[int, WorkerFacts], deaf: Collection[str] = ()) -> tuple[dict[int, str], bool]:
    """Why workers are not known to be gone, and whether that keeps their bundles from being free.

    Nodes that were deaf before are not waited for as long as the others.
    """
    left: dict[int, str] = {}
    occupied, nodes = False, by_node(facts)
    answers = ask(
        "end", {key: known for key, known in facts.items() if known.node_id not in deaf}, KILL_TIMEOUT_S
    )
    doubtful = {key: known for key, known in facts.items() if known.node_id in deaf}
    again = ask("end", doubtful, DEAF_S, patience_s=DEAF_S)
    for node_id, answer in {**answers, **again}.items():
        if isinstance(answer, UnansweredError):
            left |= dict.fromkeys(nodes[node_id], str(answer))
            occupied |= not answer.node_is_gone
            continue
        for key, pids in zip(nodes[node_id], answer, strict=True):
            if pids is None:
                left[key] = "its process ids are of another namespace than its node's"
            elif pids:
                left[key] = f"processes {pids} on its node {node_id} can't be killed"
        occupied |= any(pids is None or pids for pids in answer)
    return left, occupied
