"""A method called on several ranks, and what each of them answers."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial

from raycrew.tensor_transport._bytes import run_beside
from raycrew.tensor_transport._ray import answered
from raycrew.tensor_transport.errors import TransportError
from raycrew.tensor_transport.protocols import PeerResults, Peers

#: So long ranks wait for one that can't be called, as its group is being restarted.
HELD_UP_S = 30.0


class Calls(ABC):
    """One method, called on some ranks; whoever is interrupted while it waits can go on to wait.

    Args:
        peers: The ranks, by their numbers.
        method: What is called.
        args: With what, for each rank.
        timeout_s: Deadline of each call.
    """

    def __init__(
        self,
        peers: Mapping[int, Peers],
        method: str,
        args: Callable[[int], Sequence[object]],
        timeout_s: float | None,
    ) -> None:
        self.unknown: set[int] = set()
        """Ranks that were called, and did not answer yet."""
        self._peers, self._method, self._args, self._timeout_s = peers, method, args, timeout_s

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return len(self._peers)

    @abstractmethod
    def start(self) -> None:
        """Call all of them."""

    @abstractmethod
    def outcomes(self) -> Iterator[tuple[int, object]]:
        """What each rank answers, or the exception that says why it does not; each rank once."""


class PlainCalls(Calls):
    """Started one after another, and waited for in this order."""

    def start(self) -> None:
        self._pending: dict[int, PeerResults | Exception] = {}
        self._deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        for number, peers in self._peers.items():
            self.unknown.add(number)
            try:
                self._pending[number] = peers.call(self._method, *self._args(number))
            except Exception as error:  # noqa: BLE001 - raised once all ranks are where they have to be
                self._pending[number] = error

    def outcomes(self) -> Iterator[tuple[int, object]]:
        for number, answer in list(self._pending.items()):
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            outcome = answer if isinstance(answer, Exception) else _result(answer, left)
            del self._pending[number]
            self.unknown.discard(number)
            yield number, outcome


class ThreadedCalls(Calls):
    """Each in a thread of its own, as one may wait for the others; the first to answer comes first.

    Args:
        peers: The ranks, by their numbers.
        method: What is called.
        args: With what, for each rank.
        timeout_s: Deadline of each call.
        on_failure: Told of the rank and its failure as soon as it is known, maybe in another thread: ranks
            that are called may wait for it, and a group that replaces a lost worker waits for them.
    """

    def __init__(
        self,
        peers: Mapping[int, Peers],
        method: str,
        args: Callable[[int], Sequence[object]],
        timeout_s: float | None,
        on_failure: Callable[[int, Exception], object],
    ) -> None:
        super().__init__(peers, method, args, timeout_s)
        self._on_failure = on_failure

    def start(self) -> None:
        self._pending: dict[Future[object], int] = {}
        self._unsent = set(self._peers)
        for number, peers in self._peers.items():
            self.unknown.add(number)
            self._pending[run_beside(partial(self._call, peers, number))] = number

    def outcomes(self) -> Iterator[tuple[int, object]]:
        while self._pending:
            done, _ = wait(self._pending, HELD_UP_S, FIRST_COMPLETED)
            if not done:
                self._look()
            for future in done:
                number = self._pending.pop(future)
                outcome = future.result()
                self.unknown.discard(number)
                yield number, outcome

    def _look(self) -> None:
        """Have ranks that were called not wait for long for some that could not be."""
        unsent = [number for number in self._pending.values() if number in self._unsent]
        if len(unsent) < len(self._pending):
            for number in unsent:
                late = f"{self._method}() could not be called within {HELD_UP_S:g} s, for which others wait"
                self._on_failure(number, TransportError(late))

    def _call(self, peers: Peers, number: int) -> object:
        try:
            answer = peers.call(self._method, *self._args(number))
            self._unsent.discard(number)
            return _first(answered(answer, self._timeout_s, partial(self._on_failure, number)))
        except Exception as error:  # noqa: BLE001 - raised once all ranks are where they have to be
            return error


def _result(answer: PeerResults, timeout_s: float | None) -> object:
    try:
        return _first(answer.get_results(timeout=timeout_s))
    except Exception as error:  # noqa: BLE001 - as above
        return error


def _first(results: Sequence[object]) -> object:
    return results[0] if results else None
