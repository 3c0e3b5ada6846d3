"""All groups of a cluster, from any of its drivers: their records, and what their nodes' watches tell."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ray.exceptions import RayError

from raycrew.cluster_core import Session
from raycrew.worker_groups._health import WATCH, Seen
from raycrew.worker_groups._ray import ActorName, current_session, find_actors, named_actors, records
from raycrew.worker_groups._roster.publishing import GROUPS
from raycrew.worker_groups._roster.records import GroupRecord, WorkerRecord, record_of
from raycrew.worker_groups._roster.sights import GroupSight, ProcessKey, Stacks, group_sight, key_of


def look(timeout_s: float = 5.0, names: Sequence[str] = ()) -> list[GroupSight]:
    """All groups of the cluster that this process is connected to, or those of some names, by name.

    Groups whose drivers were killed are left out. A rank whose node does not tell in time is "unanswered".

    Args:
        timeout_s: For Ray's control service, and then for all nodes together.
        names: Which groups; all for none.

    Raises:
        GetTimeoutError: Ray's control service does not answer.
        WorkerGroupError: This process is not connected to Ray.
    """
    living, found = _groups(names, timeout_s)
    watches = _watches(found, living)
    answers = _ask(watches, "report", {}, timeout_s)
    reports: dict[ProcessKey, Seen | str] = {}
    silent: dict[str, str] = {}
    for watch, answer in answers.items():
        node_id = _node_of(watch)
        if isinstance(answer, str):
            silent[node_id] = answer
            continue
        for pid, started, seen in answer:
            # Two watches may know a process; one of them has set its eyes on it first, and knows more.
            if isinstance(seen, str):
                reports.setdefault((node_id, pid, started), seen)
            else:
                reports[node_id, pid, started] = Seen.of(seen)
    return [group_sight(record, living, reports, silent) for record in found]


def take_stacks(
    timeout_s: float = 10.0, names: Sequence[str] = (), ranks: Sequence[int] = ()
) -> list[Stacks]:
    """The stacks of all ranks of all groups, or of some, by group and rank.

    Args:
        timeout_s: For Ray's control service, and then for all nodes together.
        names: Which groups; all for none.
        ranks: Which ranks; all for none.

    Raises:
        GetTimeoutError: Ray's control service does not answer.
        WorkerGroupError: This process is not connected to Ray.
    """
    living, found = _groups(names, timeout_s)
    wanted = [(record, w) for record in found for w in record.workers if not ranks or w.rank in ranks]
    watches = _watches(found, living)
    asked: dict[ActorName, list[WorkerRecord]] = {}
    for record, worker in wanted:
        for watch in watches:
            if watch[1].startswith(f"{WATCH}{record.owner}-") and _node_of(watch) == worker.node_id:
                asked.setdefault(watch, []).append(worker)
    arguments = {
        watch: ([(w.pid, w.started) for w in workers], timeout_s * 0.8) for watch, workers in asked.items()
    }
    answers = _ask(list(asked), "stacks", arguments, timeout_s)
    told: dict[ProcessKey, tuple[str, str]] = {}
    for watch, answer in answers.items():
        given = [(answer, "")] * len(asked[watch]) if isinstance(answer, str) else answer
        for worker, stacks in zip(asked[watch], given, strict=True):
            if stacks is not None:
                told[key_of(worker)] = stacks
    return [_stacks(record, worker, living, told.get(key_of(worker))) for record, worker in wanted]


def _stacks(
    record: GroupRecord, worker: WorkerRecord, living: set[ActorName], told: tuple[str, str] | None
) -> Stacks:
    if told is not None and told[1]:
        return Stacks(record.name, worker, *told)
    if (record.namespace, worker.actor) not in living:
        return Stacks(record.name, worker, note="it is dead")
    return Stacks(record.name, worker, note="no watch on its node knows it" if told is None else told[0])


def _groups(names: Sequence[str], timeout_s: float) -> tuple[set[ActorName], list[GroupRecord]]:
    """All actors that live, and the groups of which something does."""
    left = [record_of(text) for text in records(GROUPS, timeout_s).values()]
    living = named_actors(timeout_s)  # later: a group that is there has its actors by now
    found = [
        record
        for record in left
        if record is not None and not record.is_left_over(living, f"{WATCH}{record.owner}-")
    ]
    unknown = sorted(set(names) - {record.name for record in found})
    if unknown:
        there = ", ".join(sorted({record.name for record in found})) or "none"
        raise ValueError(f"there is no worker group {', '.join(map(repr, unknown))}; there are: {there}")
    chosen = [record for record in found if not names or record.name in names]
    return living, sorted(chosen, key=lambda record: (record.name, record.namespace, record.owner))


def _watches(groups: Iterable[GroupRecord], living: Iterable[ActorName]) -> list[ActorName]:
    """The watches of the groups' owners on the groups' nodes."""
    wanted = {f"{WATCH}{group.owner}-{worker.node_id}-" for group in groups for worker in group.workers}
    return sorted(watch for watch in living if watch[1].rpartition("-")[0] + "-" in wanted)


def _node_of(watch: ActorName) -> str:
    return watch[1].removeprefix(WATCH).split("-")[1]


def _ask(
    watches: Sequence[ActorName],
    method: str,
    arguments: Mapping[ActorName, tuple[Any, ...]],
    timeout_s: float,
) -> dict[ActorName, Any]:
    """What each watch answers, or why it does not; all together take no longer than the time."""
    session, deadline = current_session(), time.monotonic() + timeout_s
    handles = find_actors(watches, timeout_s)
    with session.while_connected():
        asked = {w: getattr(handle, method).remote(*arguments.get(w, ())) for w, handle in handles.items()}
    found = {watch: "its node's watch has just ended" for watch in watches if watch not in asked}
    left = max(0.0, deadline - time.monotonic())
    done, _ = session.wait(list(asked.values()), num_returns=len(asked), timeout=left) if asked else ([], [])
    answered = set(done)
    late = f"its node did not answer within {timeout_s:g} s"
    told = {w: _answer(session, ref) if ref in answered else late for w, ref in asked.items()}
    return found | told


def _answer(session: Session, reference: Any) -> Any:
    try:
        return session.get(reference)
    except RayError as error:
        return f"its node's watch can't be asked: {type(error).__name__}"
