"""Calls on every rank of some groups, and what is known of each rank afterwards."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from raycrew.tensor_transport.errors import UpdateAbortedError, WeightUpdateError
from raycrew.tensor_transport.protocols import PeerGroup, PeerResults, Peers
from raycrew.tensor_transport.weights._syncing.report import SyncProgress

Progress = Callable[[SyncProgress], object]


@dataclass(frozen=True)
class Member:
    """One rank of one group; numbered through all groups."""

    number: int
    label: str
    peers: Peers


def members_of(groups: Sequence[PeerGroup], recipients: Sequence[int] | None) -> list[Member]:
    """The ranks of some groups, or those among them that are to be called.

    Raises:
        ValueError: There is no such rank, or none at all.
    """
    found: list[Member] = []
    number = 0
    for index, group in enumerate(groups):
        for rank in (int(getattr(entry, "rank", entry)) for entry in group.ranks):
            label = f"rank {rank}" if len(groups) == 1 else f"rank {rank} of group {index}"
            if recipients is None or number in recipients:
                found.append(Member(number, label, group.on(ranks=[rank])))
            number += 1
    if unknown := sorted(set(recipients or ()) - set(range(number))):
        raise ValueError(f"there are no generators {unknown}; there are {number}")
    if not found:
        raise ValueError("there is no generator to update")
    return found


class Session:
    """The generators during one update.

    Args:
        members: The ranks.
        timeout_s: Deadline of each call.
        together: Call each rank in a thread of its own, as one may wait for the others.
        progress: Told whenever a rank is done.
    """

    def __init__(
        self,
        members: Sequence[Member],
        timeout_s: float | None,
        *,
        together: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.failures: dict[int, Exception] = {}
        self.on_failure: Callable[[str], object] | None = None
        self._members = {member.number: member for member in members}
        self._timeout_s, self._together, self._progress = timeout_s, together, progress
        self._notes: list[str] = []
        self._mixed: set[int] = set()
        self._reached_all = False

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return len(self._members)

    def call(
        self, phase: str, method: str, *args: object, changes_weights: bool = False
    ) -> dict[int, object]:
        """Call a method on all ranks; their results, and failures are kept."""
        results, failures = self._call(list(self._members), phase, method, *args)
        self.failures |= failures
        if changes_weights:
            self._mixed = {number for number, error in failures.items() if not _is_intact(error)}
        return results

    def drop(self, numbers: Sequence[int], method: str, version: int) -> None:
        """Have ranks forget a version that was given up: to apply it drops what is fetched of it."""
        _, failures = self._call(numbers, "apply", method, version)
        self._notes += [
            f"{method}() failed on {self._label(number)}: {error!r}"
            for number, error in failures.items()
            if not is_abortion(error)
        ]

    def resume(self, method: str) -> None:
        """Call a method on the ranks whose weights are those of one version."""
        healthy = [number for number in self._members if number not in self._mixed]
        _, failures = self._call(healthy, "resume", method)
        self._notes += [
            f"{method}() failed on {self._label(number)}: {error!r}" for number, error in failures.items()
        ]
        self._notes += [
            f"{self._label(number)} is not resumed: its weights are, or may be, a mixture of two versions"
            for number in sorted(self._mixed)
        ]
        if not self.failures:
            self.failures, self._reached_all = failures, True

    def raise_first(self, version: int, cause: Exception | None = None) -> None:
        """Raise the first failure, if there was one: the trainer's, or one that others followed."""
        failures = sorted(self.failures.items(), key=lambda item: (is_abortion(item[1]), item[0]))
        if cause is not None and (not failures or not is_abortion(cause)):
            first, error, others = -1, cause, failures
        elif failures:
            (first, error), *others = failures
        else:
            return
        self._notes += [f"{self._label(other)} failed, too: {failure!r}" for other, failure in others]
        if first >= 0 and not self._reached_all:
            self._notes.append(
                f"{self._label(first)} failed: weight update {version} did not reach every generator; "
                "it can be applied again"
            )
        for note in self._notes:
            error.add_note(note)
        raise error

    def _call(
        self, numbers: Sequence[int], phase: str, method: str, *args: object
    ) -> tuple[dict[int, object], dict[int, Exception]]:
        results: dict[int, object] = {}
        failures: dict[int, Exception] = {}
        answers = self._in_threads if self._together else self._one_by_one
        for number, outcome in answers(numbers, method, args):
            if isinstance(outcome, Exception):
                failures[number] = outcome
                self._say(f"{method}() failed on {self._label(number)}: {outcome!r}")
            else:
                results[number] = outcome
            if self._progress is not None:
                self._progress(SyncProgress(phase, len(results) + len(failures), len(numbers)))
        return dict(sorted(results.items())), failures

    def _one_by_one(
        self, numbers: Sequence[int], method: str, args: tuple[object, ...]
    ) -> Iterator[tuple[int, object]]:
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        pending: dict[int, PeerResults | Exception] = {}
        for number in numbers:
            try:
                pending[number] = self._members[number].peers.call(method, *args)
            except Exception as error:  # noqa: BLE001 - raised once all ranks are where they have to be
                pending[number] = error
        for number, answer in pending.items():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            yield number, answer if isinstance(answer, Exception) else _result(answer, left)

    def _in_threads(
        self, numbers: Sequence[int], method: str, args: tuple[object, ...]
    ) -> Iterator[tuple[int, object]]:
        pool = ThreadPoolExecutor(max(1, len(numbers)), thread_name_prefix="weight-sync")
        try:
            pending: dict[Future[object], int] = {
                pool.submit(call, self._members[number].peers, method, args, self._timeout_s): number
                for number in numbers
            }
            for future in as_completed(pending):
                yield pending[future], future.result()
        finally:
            pool.shutdown(wait=False)

    def _say(self, reason: str) -> None:
        if self.on_failure is not None:
            self.on_failure(reason)

    def _label(self, number: int) -> str:
        return self._members[number].label


def call(peers: Peers, method: str, args: tuple[object, ...], timeout_s: float | None) -> object:
    """What a rank answers, or why it does not."""
    try:
        return _result(peers.call(method, *args), timeout_s)
    except Exception as error:  # noqa: BLE001 - raised once all ranks are where they have to be
        return error


def is_abortion(error: BaseException) -> bool:
    """Whether a rank failed only because the version was given up elsewhere."""
    return any(isinstance(found, UpdateAbortedError) for found in _chain(error))


def _result(answer: PeerResults, timeout_s: float | None) -> object:
    try:
        results = answer.get_results(timeout=timeout_s)
    except Exception as error:  # noqa: BLE001 - as above
        return error
    return results[0] if results else None


def _is_intact(error: BaseException) -> bool:
    """Whether a failed rank said that its weights are those of one version; a silent one did not."""
    for found in _chain(error):
        if isinstance(found, WeightUpdateError):
            return found.intact
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__
