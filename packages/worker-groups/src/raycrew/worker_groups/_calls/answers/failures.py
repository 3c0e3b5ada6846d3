"""From what Ray raises to an error that says which worker failed where."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray.exceptions import GetTimeoutError, RayError

from raycrew.worker_groups._calls.answers.deaths import Death, note_death, over_limit, sights_of_dead
from raycrew.worker_groups._calls.answers.waiting import Settled
from raycrew.worker_groups._health import Seen
from raycrew.worker_groups._on_nodes import read_tail
from raycrew.worker_groups._ray import (
    cause_of,
    current_session,
    is_alive_node,
    is_death,
    may_come_back,
    run_on_node,
)
from raycrew.worker_groups.errors import (
    ResultTimeoutError,
    WorkerFailureError,
    WorkerFailuresError,
    WorkerMemoryError,
    WorkerStartTimeoutError,
    combine,
)
from raycrew.worker_groups.sharding import RankInfo, WorkerFacts

_TAIL_BYTES = 8192
_TAIL_LINES = 20
_TAIL_TIMEOUT_S = 10.0
_MAX_TAILS = 4


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What an error can say about where a worker is.

    Attributes:
        group_name: Name of its group.
        info: Its rank's information, once it has one.
        facts: What its process said, once it did.
        bundle_index: The bundle that it was meant for.
        seat: The same in words, for a worker without a rank.
        deaths: That its worker was seen to have died, once it was.
    """

    group_name: str
    info: RankInfo | None = None
    facts: WorkerFacts | None = None
    bundle_index: int | None = None
    seat: str = ""
    deaths: list[Death] = field(default_factory=list, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.group_name, self.info, self.facts, self.bundle_index, self.seat)

    def note_death(self, seen: Seen | None = None) -> Death:
        """The first note of its worker's death, made now if there is none.

        Args:
            seen: What its node's watch has seen of it.
        """
        return note_death(self.deaths, seen)

    @property
    def details(self) -> dict[str, Any]:
        """As attributes of `WorkerFailureError`."""
        facts, info = self.facts, self.info
        return {
            "group_name": self.group_name,
            "rank": info.rank if info else None,
            "bundle_index": info.bundle_index if info else self.bundle_index,
            "node_id": facts.node_id if facts else None,
            "node_address": facts.node_address if facts else None,
            "device_index": facts.device_index if facts else None,
            "pid": facts.pid if facts else None,
        }

    def __str__(self) -> str:
        who = f"rank {self.info.rank}" if self.info else self.seat
        parts = [f"{who} of {self.group_name!r}"]
        if self.details["bundle_index"] is not None:
            parts.append(f"bundle {self.details['bundle_index']}")
        if self.facts:
            parts.append(f"node {self.facts.node_id[:8]} at {self.facts.node_address}")
            parts.append(f"pid {self.facts.pid}")
            if self.facts.device_index is not None:
                parts.append(f"{self.facts.device_kind} device {self.facts.device_index}")
        return ", ".join(parts)


def failure(
    where: Whereabouts,
    error: BaseException,
    method: str,
    *,
    elapsed_s: float | None = None,
    pending: Sequence[int] = (),
    log_tail: str = "",
    seen: Seen | None = None,
) -> WorkerFailureError:
    """The error of one worker whose call failed; `seen` is what its node's watch has seen of a dead one."""
    cause, traceback, pid = cause_of(error)
    died = is_death(error)
    what = f"{method} raised {described(cause)}"
    if died:
        what = _ending(where, cause, method, elapsed_s, seen)
    over = over_limit(where.facts, seen)
    if over:
        sizes = "{measured_bytes:,} bytes of private memory, and memory_limit is {limit_bytes:,}".format(
            **over
        )
        what += f": its node's watch ended it for {sizes}"
    after = "" if elapsed_s is None else f" after {elapsed_s:.1f} s"
    text = f"{where}: {what}{after}"
    if died:
        text += f"\n{words(cause)}"
        hint = "" if method == "__init__" else "\nrestart_failed_workers() of its group replaces it"
        text += hint + (", if it has died" if hint and may_come_back(cause) else "")
    if pending:
        text += f"\nnot done yet when this was raised: ranks {list(pending)}"
    known = {k: v for k, v in where.details.items() if v is not None}
    kind = WorkerMemoryError if over else WorkerFailureError
    return kind(
        text,
        **{
            "pid": pid,
            **known,
            "method": method,
            "elapsed_s": elapsed_s,
            "cause": cause,
            "traceback": traceback,
            "log_tail": log_tail,
            "pending": pending,
            **over,
        },
    )


def _ending(
    where: Whereabouts, cause: BaseException, method: str, elapsed_s: float | None, seen: Seen | None
) -> str:
    """What became of a worker's process; notes that it died."""
    if may_come_back(cause):
        return f"could not be reached during {method}"
    sent = None if elapsed_s is None else time.monotonic() - elapsed_s
    return where.note_death(seen).told_by(method, sent)


def group_failure(
    settled: Settled,
    places: Mapping[int, Whereabouts],
    group_name: str,
    method: str,
    elapsed_s: float,
) -> WorkerFailureError:
    """One error for the failures of some calls; positions are ranks."""
    return _one(group_failures(settled, places, group_name, method, elapsed_s))


def group_failures(
    settled: Settled,
    places: Mapping[int, Whereabouts],
    group_name: str,
    method: str,
    elapsed_s: float,
) -> dict[int, WorkerFailureError]:
    """The errors of some calls that failed, by rank; positions are ranks."""
    known = {r: places.get(r) or Whereabouts(group_name, seat=f"rank {r}") for r in settled.errors}
    return _each(settled.errors, known, method, dict.fromkeys(known, elapsed_s), settled.pending)


def failures_of(
    errors: Mapping[int, Exception],
    places: Mapping[int, Whereabouts],
    method: str,
    elapsed_s: Mapping[int, float],
    pending: Sequence[int],
) -> WorkerFailureError:
    """One error for several; all but `pending` by the same keys, whose order is that of the failures."""
    return _one(_each(errors, places, method, elapsed_s, pending))


def _each(
    errors: Mapping[int, Exception],
    places: Mapping[int, Whereabouts],
    method: str,
    elapsed_s: Mapping[int, float],
    pending: Sequence[int],
) -> dict[int, WorkerFailureError]:
    seen = sights_of_dead(errors, {key: places[key].facts for key in errors})
    failures: dict[int, WorkerFailureError] = {}
    for key, error in sorted(errors.items()):
        tail = log_tail(places[key].facts) if len(failures) < _MAX_TAILS else ""
        failures[key] = failure(
            places[key],
            error,
            method,
            elapsed_s=elapsed_s[key],
            pending=pending,
            log_tail=tail,
            seen=seen.get(key),
        )
    return failures


def _one(failures: Mapping[int, WorkerFailureError]) -> WorkerFailureError:
    return combine(culprits_first(failures.values()))


def culprits_first(failures: Iterable[WorkerFailureError]) -> list[WorkerFailureError]:
    """Those whose worker died, then the others, which may have failed of that; each in rank order."""
    return sorted(failures, key=lambda f: (not has_died(f), -1 if f.rank is None else f.rank))


def has_died(error: WorkerFailureError) -> bool:
    """Whether a failure, or one of several, is that a worker died."""
    return any(part.cause is not None and is_death(part.cause) for part in parts_of(error))


def parts_of(error: WorkerFailureError) -> tuple[WorkerFailureError, ...]:
    """The failures of an error, one by one."""
    return error.exceptions if isinstance(error, WorkerFailuresError) else (error,)


def described(error: BaseException) -> str:
    """The type of an error, and what it says, if that is anything."""
    return ": ".join(filter(None, (type(error).__name__, words(error))))


def words(error: BaseException) -> str:
    """What an error says, with its notes; neither need be what Python expects."""
    notes = getattr(error, "__notes__", ())
    parts = [error, *(notes if isinstance(notes, list | tuple) else [notes])]
    return " ".join(map(_text, parts)).strip()


def _text(part: object) -> str:
    try:
        return str(part)
    except Exception as error:  # noqa: BLE001 - whatever the user's own code raises
        return f"<a {type(part).__name__} whose text raised {type(error).__name__}>"


def start_timeout(
    where: Whereabouts,
    stage: str,
    others: Sequence[str],
    timeout_s: float,
    log_tail: str = "",
    method: str = "__init__",
) -> WorkerStartTimeoutError:
    """The error of a group whose start-up took too long, told by its first worker that was not done."""
    text = f"{where}: {stage} within the {timeout_s:g} s of init_timeout_s"
    if others:
        text += f"; neither had {len(others)} more: {', '.join(others[:8])}"
    return WorkerStartTimeoutError(
        text, **where.details, method=method, elapsed_s=timeout_s, log_tail=log_tail
    )


def too_late(called: str, ranks: Sequence[int], elapsed_s: float) -> ResultTimeoutError:
    """The error of a call that some ranks have not answered."""
    return ResultTimeoutError(
        f"{called}: ranks {sorted(ranks)} have not answered {elapsed_s:.1f} s after the call; they go on, "
        "and the same future can be waited for again",
        sorted(ranks),
    )


def log_tail(facts: WorkerFacts | None) -> str:
    """The last lines of a worker's output, read here or by a task on its node; empty if it can't be had."""
    if facts is None or not facts.log_paths:
        return ""
    if all(Path(path).exists() for path in facts.log_paths):
        return read_tail(facts.log_paths, _TAIL_LINES, _TAIL_BYTES)
    try:
        if not is_alive_node(facts.node_id):
            return ""
        asked = run_on_node(read_tail, [facts.log_paths, _TAIL_LINES, _TAIL_BYTES], node_id=facts.node_id)
        return str(current_session().get(asked, timeout=_TAIL_TIMEOUT_S))
    except (RayError, GetTimeoutError):
        return ""
