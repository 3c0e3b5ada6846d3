"""What a timeline comes to: how idle each group's ranks were, and which rank the others waited for. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from raycrew.worker_groups._health.timeline.records import RUNNING, WAITING, Call, spans_of


@dataclass(frozen=True, slots=True)
class GroupShares:
    """What the ranks of a group did between the first call's start and the last one's end.

    The three shares are of the time of all ranks that were called, and come to 1.

    Attributes:
        group: Its name.
        ranks: How many of its ranks were called.
        window_s: Seconds between the two.
        busy: In a method.
        waiting: Done with a call that a slower rank was still in, and in no other.
        idle: The rest.
    """

    group: str
    ranks: int
    window_s: float
    busy: float
    waiting: float
    idle: float


@dataclass(frozen=True, slots=True)
class SlowestRank:
    """Which rank the others waited for, in the calls of one method.

    Attributes:
        group: Name of the group.
        method: Name of the method.
        calls: How many calls of two ranks or more there were.
        rank: That was the last one to end most often.
        times: How often.
        mean_s: Seconds of a call, from its start to its last rank's end, on average.
        lost_s: Seconds that ranks waited for slower ones, all together.
    """

    group: str
    method: str
    calls: int
    rank: int
    times: int
    mean_s: float
    lost_s: float


@dataclass(frozen=True, slots=True)
class TimelineStatistics:
    """What a timeline comes to.

    Attributes:
        groups: How idle each one was.
        slowest: By method, which rank was the slowest.
        calls: How many calls there were.
        untold: On how many ranks it is not known when a call ran, all calls together.
    """

    groups: tuple[GroupShares, ...] = ()
    slowest: tuple[SlowestRank, ...] = ()
    calls: int = 0
    untold: int = 0


def statistics_of(calls: Sequence[Call]) -> TimelineStatistics:
    """What some calls come to."""
    by_group: dict[str, list[Call]] = defaultdict(list)
    by_method: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in calls:
        by_group[call.group].append(call)
        if len(call.running()) > 1:
            by_method[call.group, call.method].append(call)
    return TimelineStatistics(
        tuple(shares for group in sorted(by_group) if (shares := _shares(group, by_group[group]))),
        tuple(_slowest(group, method, by_method[group, method]) for group, method in sorted(by_method)),
        len(calls),
        sum(len(call.parts) - len(call.running()) for call in calls),
    )


def _shares(group: str, calls: Sequence[Call]) -> GroupShares | None:
    runs: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for call in calls:
        for rank, run in call.running().items():
            runs[rank].append(run)
    if not runs:
        return None
    waits: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in (span for call in calls for span in spans_of(call)):
        if span.kind in (RUNNING, WAITING):
            waits[span.row].append((span.start, span.end))
    window = max(c.ended or c.start or 0.0 for c in calls) - min(
        c.start for c in calls if c.start is not None
    )
    total = window * len(runs)
    if total <= 0.0:
        return GroupShares(group, len(runs), 0.0, 0.0, 0.0, 1.0)
    busy = min(1.0, sum(map(covered_s, runs.values())) / total)
    engaged = min(1.0, max(busy, sum(map(covered_s, waits.values())) / total))
    return GroupShares(group, len(runs), window, busy, engaged - busy, 1.0 - engaged)


def _slowest(group: str, method: str, calls: Sequence[Call]) -> SlowestRank:
    last: Counter[int] = Counter()
    lost_s = total_s = 0.0
    for call in calls:
        ends = {rank: ended for rank, (_, ended) in call.running().items()}
        rank, end = max(ends.items(), key=lambda item: (item[1], -item[0]))
        last[rank] += 1
        lost_s += sum(end - other for other in ends.values())
        total_s += end - (call.start or 0.0)
    rank, times = max(last.items(), key=lambda item: (item[1], -item[0]))
    return SlowestRank(group, method, len(calls), rank, times, total_s / len(calls), lost_s)


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """How much time lies within one of some spans at least."""
    changes: Counter[float] = Counter()
    for start, end in spans:
        changes[start] += 1
        changes[end] -= 1
    depth, total = 0, 0.0
    for (at, change), (following, _) in pairwise(sorted(changes.items())):
        depth += change
        total += following - at if depth else 0.0
    return total
