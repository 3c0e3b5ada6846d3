"""All groups of a cluster, from any of its drivers: their records, and what their nodes' watches tell."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ray.exceptions import GetTimeoutError, RayError

from raycrew.cluster_core import Session
from raycrew.worker_groups._health.reports import Seen
from raycrew.worker_groups._health.roster.publishing import GROUPS
from raycrew.worker_groups._health.roster.records import GroupRecord, WorkerRecord, record_of
from raycrew.worker_groups._health.roster.sights import GroupSight, ProcessKey, Stacks, group_sight, key_of
from raycrew.worker_groups._health.watches import WATCH
from raycrew.worker_groups._ray import (
    ActorName,
    current_session,
    drop_records,
    find_actors,
    living_jobs,
    named_actors,
    records,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NODES_PART = 0.8  # of the time that is left, for the nodes' own work; the rest is for their answers' way
_UNKNOWN = "no watch on its node knows it"


class UnknownGroupError(ValueError):
    """There is no group of a name."""


class Found(list[T]):
    """What was found, in order.

    Attributes:
        n_unread: How many groups there are besides that can't be told of: another version made them.
    """

    def __init__(self, found: Iterable[T], n_unread: int) -> None:
        super().__init__(found)
        self.n_unread = n_unread


def look(timeout_s: float = 5.0, names: Sequence[str] = ()) -> Found[GroupSight]:
    """All groups of the cluster that this process is connected to, or those of some names, by name.

    Groups that are starting are there, too; those whose drivers were killed are left out. A rank whose node
    does not tell in time is "unanswered".

    Args:
        timeout_s: For Ray's control service and all nodes together.
        names: Which groups; all for none.

    Raises:
        GetTimeoutError: Ray's control service does not answer.
        UnknownGroupError: There is none of a name.
        WorkerGroupError: This process is not connected to Ray.
    """
    time_left = _countdown(timeout_s)
    living, found = _groups(names, time_left)
    watches = _watches(found, living)
    answers = _ask(watches, "report", lambda _: (), time_left, timeout_s)
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
    now = time.time()
    return Found((group_sight(record, living, reports, silent, now) for record in found), found.n_unread)


def take_stacks(
    timeout_s: float = 10.0, names: Sequence[str] = (), ranks: Sequence[int] = ()
) -> Found[Stacks]:
    """The stacks of all ranks of all groups, or of some, by group and rank; last of those that stand by.

    Args:
        timeout_s: For Ray's control service and all nodes together.
        names: Which groups; all for none.
        ranks: Which ranks; all for none, and those that stand by.

    Raises:
        GetTimeoutError: Ray's control service does not answer.
        UnknownGroupError: There is none of a name.
        ValueError: No group of those has a rank that is named.
        WorkerGroupError: This process is not connected to Ray.
    """
    time_left = _countdown(timeout_s)
    living, found = _groups(names, time_left)
    wanted = [(record, w) for record in found for w in record.processes if not ranks or w.rank in ranks]
    if found and (unknown := sorted(set(ranks).difference(worker.rank for _, worker in wanted))):
        there = ", ".join(record.name for record in found)
        raise ValueError(f"no group that was looked at ({there}) has a rank {', '.join(map(str, unknown))}")
    told = _told(wanted, living, "stacks", lambda _: (), time_left, timeout_s)
    stacks = (_stacks(record, worker, living, told.get(key_of(worker))) for record, worker in wanted)
    return Found(stacks, found.n_unread)


def examine_groups(
    timeout_s: float, names: Sequence[str], wanted: Callable[[WorkerRecord, int], Mapping[str, Any]]
) -> Found[tuple[GroupRecord, list[dict[str, Any] | str]]]:
    """What watches find out about all ranks of all groups, or of some, and who stands by, for a diagnosis.

    Args:
        timeout_s: For Ray's control service and all nodes together.
        names: Which groups; all for none.
        wanted: What is wanted of a rank, of so many: what `Watch.examine` takes.

    Returns:
        Each group with the answers for its processes, in order, or why there is none.

    Raises:
        GetTimeoutError: Ray's control service does not answer.
        UnknownGroupError: There is none of a name.
        WorkerGroupError: This process is not connected to Ray.
    """
    time_left = _countdown(timeout_s)
    living, found = _groups(names, time_left)
    ranks = [(record, worker) for record in found for worker in record.processes]

    def details(workers: Sequence[WorkerRecord]) -> tuple[Any, ...]:
        return ([dict(wanted(worker, len(ranks))) for worker in workers],)

    told = _told(ranks, living, "examine_known", details, time_left, timeout_s)

    def answers(record: GroupRecord) -> list[dict[str, Any] | str]:
        return [_examined(record, worker, living, told.get(key_of(worker))) for worker in record.processes]

    return Found(((record, answers(record)) for record in found), found.n_unread)


def _told(
    ranks: Sequence[tuple[GroupRecord, WorkerRecord]],
    living: Iterable[ActorName],
    method: str,
    details: Callable[[Sequence[WorkerRecord]], tuple[Any, ...]],
    time_left: Callable[[], float],
    timeout_s: float,
) -> dict[ProcessKey, Any]:
    """What the watches of the groups' owners tell of ranks that they know, or as a text why they do not."""
    watches = _watches([record for record, _ in ranks], living)
    asked: dict[ActorName, list[WorkerRecord]] = {}
    for record, worker in ranks:
        for watch in watches:
            if watch[1].startswith(f"{WATCH}{record.owner}-") and _node_of(watch) == worker.node_id:
                asked.setdefault(watch, []).append(worker)

    def wanted_of(watch: ActorName) -> tuple[Any, ...]:
        workers = asked[watch]
        processes = [(worker.pid, worker.started) for worker in workers]
        return processes, time_left() * _NODES_PART, *details(workers)

    told: dict[ProcessKey, Any] = {}
    for watch, answer in _ask(list(asked), method, wanted_of, time_left, timeout_s).items():
        given = [answer] * len(asked[watch]) if isinstance(answer, str) else answer
        for worker, one in zip(asked[watch], given, strict=True):
            if one is not None:
                told[key_of(worker)] = one
    return told


def _countdown(timeout_s: float) -> Callable[[], float]:
    """Tells how much is left of a time that begins now."""
    deadline = time.monotonic() + timeout_s
    return lambda: max(0.0, deadline - time.monotonic())


def _stacks(
    record: GroupRecord, worker: WorkerRecord, living: set[ActorName], told: tuple[str, str] | str | None
) -> Stacks:
    text, told_by = told if isinstance(told, tuple) else (told or _UNKNOWN, "")
    if told_by:
        return Stacks(record, worker, text, told_by)
    is_dead = (record.namespace, worker.actor) not in living
    return Stacks(record, worker, note="it is dead" if is_dead else text)


def _examined(
    record: GroupRecord, worker: WorkerRecord, living: set[ActorName], told: dict[str, Any] | str | None
) -> dict[str, Any] | str:
    if isinstance(told, dict):
        return told
    is_dead = (record.namespace, worker.actor) not in living
    return {"seen": {"is_alive": False}} if is_dead else told or _UNKNOWN


def _groups(
    names: Sequence[str], time_left: Callable[[], float]
) -> tuple[set[ActorName], Found[GroupRecord]]:
    """All actors that live, and the groups of which something does."""
    texts = records(GROUPS, time_left())
    living = named_actors(time_left())  # later: a group that is there has its actors by now
    read = {key: record for key, text in texts.items() if (record := record_of(text)) is not None}
    lifeless = {key: record for key, record in read.items() if _is_left_over(record, living)}
    starting = _starting(lifeless.values(), time_left)
    left_over = {key: texts[key] for key, record in lifeless.items() if record not in starting}
    if left_over:
        _drop(left_over, time_left)
    found = [record for key, record in read.items() if key not in left_over]
    unknown = sorted({name for name in names if not any(record.is_meant_by(name) for record in found)})
    if unknown:
        there = ", ".join(sorted({record.name for record in found})) or "none"
        raise UnknownGroupError(
            f"there is no worker group {', '.join(map(repr, unknown))}; there are: {there}"
        )
    chosen = (record for record in found if not names or any(map(record.is_meant_by, names)))
    in_order = sorted(chosen, key=lambda record: (record.name, record.driver, record.owner))
    return living, Found(in_order, len(texts) - len(read))


def _is_left_over(record: GroupRecord, living: set[ActorName]) -> bool:
    return record.is_left_over(living, f"{WATCH}{record.owner}-")


def _starting(lifeless: Collection[GroupRecord], time_left: Callable[[], float]) -> list[GroupRecord]:
    """Those that have no actor yet."""
    if not any(record.start for record in lifeless):
        return []
    jobs, now = living_jobs(time_left()), time.time()
    return [record for record in lifeless if record.start and not record.start.is_over(now, jobs)]


def _drop(left_over: Mapping[str, str], time_left: Callable[[], float]) -> None:
    """Take away what nobody lives of; a record that was put anew meanwhile stays."""
    try:
        again, living = records(GROUPS, time_left()), named_actors(time_left())
        same = [key for key, text in left_over.items() if again.get(key) == text]
        still = [key for key in same if (one := record_of(again[key])) and _is_left_over(one, living)]
        drop_records(still, time_left())
    except GetTimeoutError as error:  # the next look drops them
        logger.debug("records of groups that have ended stay: %s", error)


def _watches(groups: Iterable[GroupRecord], living: Iterable[ActorName]) -> list[ActorName]:
    """The watches of the groups' owners on the groups' nodes."""
    wanted = {f"{WATCH}{group.owner}-{worker.node_id}-" for group in groups for worker in group.processes}
    return sorted(watch for watch in living if watch[1].rpartition("-")[0] + "-" in wanted)


def _node_of(watch: ActorName) -> str:
    return watch[1].removeprefix(WATCH).split("-")[1]


def _ask(
    watches: Sequence[ActorName],
    method: str,
    arguments: Callable[[ActorName], tuple[Any, ...]],
    time_left: Callable[[], float],
    timeout_s: float,
) -> dict[ActorName, Any]:
    """What each watch answers, or why it does not; all together take no longer than the time that is left."""
    session = current_session()
    handles = find_actors(watches, time_left())
    with session.while_connected():
        able = {w: handle for w, handle in handles.items() if hasattr(handle, method)}
        asked = {w: getattr(handle, method).remote(*arguments(w)) for w, handle in able.items()}
    found = dict.fromkeys(watches, "its node's watch has just ended")
    found |= dict.fromkeys(handles, "its node's watch is of another version of raycrew")
    refs = list(asked.values())
    done, _ = session.wait(refs, num_returns=len(refs), timeout=time_left()) if refs else ([], [])
    answered = set(done)
    late = f"its node did not answer within {timeout_s:g} s"
    told = {w: _answer(session, ref) if ref in answered else late for w, ref in asked.items()}
    return found | told


def _answer(session: Session, reference: Any) -> Any:
    try:
        return session.get(reference)
    except RayError as error:
        return f"its node's watch can't be asked: {type(error).__name__}"
