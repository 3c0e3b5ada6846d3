"""A method called on several ranks, and what each of them answers."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

from raycrew.tensor_transport.protocols import PeerResults, Peers


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
    """Each in a thread of its own, as one may wait for the others; the first to answer comes first."""

    def start(self) -> None:
        self._pending: dict[Future[object], int] = {}
        pool = ThreadPoolExecutor(max(1, len(self._peers)), thread_name_prefix="weight-sync")
        try:
            for number, peers in self._peers.items():
                self.unknown.add(number)
                self._pending[pool.submit(self._call, peers, number)] = number
        finally:
            pool.shutdown(wait=False)

    def outcomes(self) -> Iterator[tuple[int, object]]:
        for future in as_completed(list(self._pending)):
            number = self._pending.pop(future)
            outcome = future.result()
            self.unknown.discard(number)
            yield number, outcome

    def _call(self, peers: Peers, number: int) -> object:
        try:
            return _result(peers.call(self._method, *self._args(number)), self._timeout_s)
        except Exception as error:  # noqa: BLE001 - raised once all ranks are where they have to be
            return error


def _result(answer: PeerResults, timeout_s: float | None) -> object:
    try:
        results = answer.get_results(timeout=timeout_s)
    except Exception as error:  # noqa: BLE001 - as above
        return error
    return results[0] if results else None
