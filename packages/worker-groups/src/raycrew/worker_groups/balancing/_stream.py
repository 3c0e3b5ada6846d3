"""A stream of items over several workers: who holds what, what waits, what goes again. No Ray here."""

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

from raycrew.worker_groups.balancing._strategies import Strategy, WorkerLoad

S = TypeVar("S")

MAX_RESENDS = 1
"""An item that two workers were lost with does not get a third."""

LATER: Final = object()
"""What a source gives that has no item now, and may have one later."""


class LostWorkerError(Exception):
    """The worker of an item is gone, or another one is to have it; `__cause__` is what a caller is told."""


class GoneWorkerError(Exception):
    """The worker that was chosen has left its group since; nothing was sent to it."""


@dataclass(eq=False, slots=True)
class Item:
    """One item on its way."""

    index: int
    value: Any
    key: Any
    resends: int = 0


class Workers(Protocol[S]):
    """What a stream needs of workers; `S` is an item that was sent."""

    def loads(self) -> Sequence[WorkerLoad]:
        """The living workers, in rank order; none while all of them are kept for something else."""
        ...

    def send(self, rank: int, item: Item) -> S:
        """Send an item to a worker.

        Raises:
            GoneWorkerError: It has left since it was chosen.
        """
        ...

    def wait(self, sent: Sequence[S]) -> Sequence[S]:
        """Those that are done; at least one, unless the source was to be asked again."""
        ...

    def collect(self, sent: S) -> Any:
        """The result of one that is done.

        Raises:
            LostWorkerError: Its worker was lost, and it may go to another.
        """
        ...

    def abandon(self, sent: Sequence[S]) -> None:
        """Forget these; their results are not wanted."""
        ...


class Stream(Generic[S]):
    """Sends items as workers get free.

    Args:
        workers: The workers.
        strategy: Chooses among them.
        items: The source, read as late as possible; where it gives `LATER`, it is asked again after the
            next wait.
        key: Makes the strategy's key of an item.
        max_outstanding: Most items of this stream per worker.
        window: Most items taken from the source and not counted in `given`, or tells how many that are now;
            None for no bound.
        max_resends: How often an item may go to another worker.

    Attributes:
        given: How many results, in the items' order, the caller has given on.
    """

    def __init__(
        self,
        workers: Workers[S],
        strategy: Strategy,
        items: Iterable[Any],
        key: Callable[[Any], Any],
        max_outstanding: int,
        window: int | Callable[[], int] | None = None,
        max_resends: float = MAX_RESENDS,
    ) -> None:
        self.given = 0
        self._max_resends = max_resends
        self._workers = workers
        self._strategy = strategy
        self._source = iter(items)
        self._key = key
        self._max_outstanding = max_outstanding
        self._window = window if window is None or callable(window) else partial(int, window)
        self._taken = 0
        self._exhausted = self._is_late = False
        self._again: deque[Item] = deque()
        self._parked: dict[int, deque[Item]] = {}
        self._sent: dict[S, tuple[int, Item]] = {}
        self._held: Counter[int] = Counter()

    def pairs(self) -> Generator[tuple[int, Any], None, None]:
        """Index and result of each item as they come; closing it abandons what is left."""
        try:
            while True:
                self._fill()
                if not self._sent and not self._is_late:
                    return
                for sent in self._workers.wait(list(self._sent)):
                    rank, item = self._sent.pop(sent)
                    self._held[rank] -= 1
                    try:
                        value = self._workers.collect(sent)
                    except LostWorkerError as lost:
                        if item.resends >= self._max_resends:
                            raise (lost.__cause__ or lost) from None
                        item.resends += 1
                        self._again.append(item)
                    else:
                        yield item.index, value
        finally:
            self._workers.abandon(list(self._sent))

    def _fill(self) -> None:
        self._is_late = False
        loads = self._workers.loads()
        self._unpark({load.rank for load in loads})
        if not loads:
            self._is_late = bool(self._again) or not self._exhausted
        while any(self._has_room(load.rank) for load in loads) and self._may_park(len(loads)):
            item = self._next()
            if item is None:
                return
            offered = loads if self._strategy.sticky else [x for x in loads if self._has_room(x.rank)]
            rank = self._strategy.choose(offered, item.key)
            self._parked.setdefault(rank, deque()).append(item)
            self._unpark_of(rank)
            loads = self._workers.loads()

    def _unpark(self, living: set[int]) -> None:
        """Send what waited for a worker that has room now; what waited for a lost one is placed anew."""
        for rank in list(self._parked):
            waiting = self._parked[rank]
            if rank not in living:
                self._again.extend(waiting)
                waiting.clear()
            self._unpark_of(rank)

    def _unpark_of(self, rank: int) -> None:
        waiting = self._parked[rank]
        while waiting and self._has_room(rank):
            try:
                self._send(rank, waiting[0])
            except GoneWorkerError:
                self._again.extend(waiting)
                waiting.clear()
            else:
                waiting.popleft()
        if not waiting:
            del self._parked[rank]

    def _may_park(self, n_workers: int) -> bool:
        return sum(map(len, self._parked.values())) < 2 * self._max_outstanding * n_workers

    def _has_room(self, rank: int) -> bool:
        return self._held[rank] < self._max_outstanding

    def _next(self) -> Item | None:
        if self._again:
            return self._again.popleft()
        if self._exhausted or (self._window is not None and self._taken - self.given >= self._window()):
            return None
        try:
            value = next(self._source)
        except StopIteration:
            self._exhausted = True
            return None
        if value is LATER:
            self._is_late = True
            return None
        item = Item(self._taken, value, self._key(value))
        self._taken += 1
        return item

    def _send(self, rank: int, item: Item) -> None:
        self._sent[self._workers.send(rank, item)] = (rank, item)
        self._held[rank] += 1
