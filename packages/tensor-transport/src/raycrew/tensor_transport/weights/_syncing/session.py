"""Calls on every rank of some groups, and what is known of each rank afterwards."""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field

from raycrew.tensor_transport.errors import UpdateAbortedError, WeightUpdateError
from raycrew.tensor_transport.protocols import PeerGroup, Peers
from raycrew.tensor_transport.weights._syncing.calling import Calls, PlainCalls, ThreadedCalls
from raycrew.tensor_transport.weights._syncing.mixtures import mixed_ranks
from raycrew.tensor_transport.weights._syncing.report import SyncProgress

Progress = Callable[[SyncProgress], object]
Argument = Callable[[int], object]
"""What a rank is given."""


@dataclass(frozen=True)
class Member:
    """One rank of one group; numbered through all groups.

    Attributes:
        number: Through all groups.
        label: For people.
        peers: Calls it.
        rank: Within its group.
        mixed: The ranks of its group whose weights are, or may be, a mixture.
    """

    number: int
    label: str
    peers: Peers
    rank: int = 0
    mixed: set[int] = field(default_factory=set)

    @property
    def is_mixed(self) -> bool:
        """Whether its weights are, or may be, a mixture."""
        return self.rank in self.mixed

    def note(self, *, is_mixed: bool) -> None:
        """Remember that, for later updates of its group too."""
        if is_mixed:
            self.mixed.add(self.rank)
        else:
            self.mixed.discard(self.rank)


def members_of(groups: Sequence[PeerGroup], recipients: Sequence[int] | None) -> list[Member]:
    """The ranks of some groups, or those among them that are to be called.

    Raises:
        ValueError: There is no such rank, or none at all.
    """
    found: list[Member] = []
    number = 0
    for index, group in enumerate(groups):
        mixed = mixed_ranks(group)
        for rank in map(_rank_of, group.ranks):
            label = f"rank {rank}" if len(groups) == 1 else f"rank {rank} of group {index}"
            if recipients is None or number in recipients:
                found.append(Member(number, label, group.on(ranks=[rank]), rank, mixed))
            number += 1
    if unknown := sorted(set(recipients or ()) - set(range(number))):
        raise ValueError(f"there are no generators {unknown}; there are {number}")
    if not found:
        raise ValueError("there is no generator to update")
    return found


def everyone(group: PeerGroup) -> Peers:
    """All ranks of a group, by their numbers: so each is called, whatever a method declares about itself."""
    return group.on(ranks=[_rank_of(entry) for entry in group.ranks])


def _rank_of(entry: object) -> int:
    return int(getattr(entry, "rank", entry))  # type: ignore[call-overload,no-any-return]


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
        self._done: dict[str, list[int]] = {}
        self._reached_all = False

    @property
    def numbers(self) -> list[int]:
        """The ranks."""
        return list(self._members)

    def call(
        self, phase: str, method: str, argument: Argument | None = None, *, changes_weights: bool = False
    ) -> dict[int, object]:
        """Call a method on all ranks, each with its argument; their results, and failures are kept.

        Raises:
            BaseException: What `progress` raised, or what interrupted the waiting, once all ranks answered.
        """
        if changes_weights:  # Until they answer; whatever comes between, nobody resumes them meanwhile.
            self._note_mixed(set(self._members))
        found = self._call(list(self._members), phase, method, argument)
        self.failures |= found.failures
        self._done[phase] = list(found.results)
        if changes_weights:
            silent = {number for number, error in found.failures.items() if not _is_intact(error)}
            self._note_mixed(silent | found.unknown)
        return found.checked()

    def _note_mixed(self, numbers: Set[int]) -> None:
        for number, member in self._members.items():
            member.note(is_mixed=number in numbers)

    def drop(self, method: str, version: Argument) -> None:
        """Have ranks that prepared a version, and were not asked to apply it, forget it.

        It was given up: to apply it drops what is fetched of it.
        """
        prepared = self._done.pop("prepare", [])
        if not prepared or "apply" in self._done:
            return
        found = self._call(prepared, "apply", method, version)
        self._notes += [
            _failed(method, self._label(number), error)
            for number, error in found.failures.items()
            if not is_abortion(error)
        ]
        found.checked()

    def resume(self, method: str) -> None:
        """Call a method on the ranks whose weights are those of one version."""
        healthy = [number for number, member in self._members.items() if not member.is_mixed]
        found = self._call(healthy, "resume", method)
        self._notes += [
            _failed(method, self._label(number), error) for number, error in found.failures.items()
        ]
        self._notes += [
            f"{member.label} is not resumed: its weights are, or may be, a mixture of two versions"
            for member in self._members.values()
            if member.is_mixed
        ]
        found.checked()
        if not self.failures:
            self.failures, self._reached_all = found.failures, True

    def explain(self, error: BaseException) -> None:
        """Add what is known of the ranks to an error."""
        for note in self._notes:
            error.add_note(note)

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
        self.explain(error)
        raise error

    def _call(
        self, numbers: Sequence[int], phase: str, method: str, argument: Argument | None = None
    ) -> "_Round":
        def args(number: int) -> tuple[object, ...]:
            return () if argument is None else (argument(number),)

        def fail(number: int, error: Exception) -> None:
            self._say(_failed(method, self._label(number), error))

        called = ({n: self._members[n].peers for n in numbers}, method, args, self._timeout_s)
        calls: Calls = ThreadedCalls(*called, fail) if self._together else PlainCalls(*called)
        found = _Round(calls.unknown)
        try:
            calls.start()
            self._hear(calls, found, phase, method)
        except BaseException as error:  # noqa: BLE001 - raised once it is known where each rank is
            found.interruption, self._progress = error, None
            try:
                self._say(f"the driver raised {error!r}")
                self._hear(calls, found, phase, method)
            except BaseException as second:  # noqa: BLE001 - as above: then nobody waits any more
                found.interruption = second
        return found

    def _hear(self, calls: Calls, found: "_Round", phase: str, method: str) -> None:
        for number, outcome in calls.outcomes():
            if isinstance(outcome, Exception):
                found.failures[number] = outcome
                self._say(_failed(method, self._label(number), outcome))
            else:
                found.results[number] = outcome
            if self._progress is not None:
                done = len(found.results) + len(found.failures)
                self._progress(SyncProgress(phase, done, calls.count))

    def _say(self, reason: str) -> None:
        if self.on_failure is not None:
            self.on_failure(reason)

    def _label(self, number: int) -> str:
        return self._members[number].label


@dataclass
class _Round:
    """What is known after a call: of each rank, and of what interrupted the waiting for them."""

    unknown: set[int]
    results: dict[int, object] = field(default_factory=dict)
    failures: dict[int, Exception] = field(default_factory=dict)
    interruption: BaseException | None = None

    def checked(self) -> dict[int, object]:
        """The results in the order of the ranks, unless something interrupted the waiting for them."""
        if self.interruption is not None:
            raise self.interruption
        return dict(sorted(self.results.items()))


def _failed(method: str, label: str, error: Exception) -> str:
    return f"{method}() failed on {label}: {error!r}"


def is_abortion(error: BaseException) -> bool:
    """Whether a rank failed only because the version was given up elsewhere."""
    return any(isinstance(found, UpdateAbortedError) for found in _chain(error))


def _is_intact(error: BaseException) -> bool:
    """Whether a failed rank said that its weights are those of one version; a silent one did not."""
    for found in _chain(error):
        if isinstance(found, WeightUpdateError):
            return found.intact
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what led to it; whoever raises an error from another that came of it closes a circle."""
    found: BaseException | None = error
    seen = set[int]()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__
