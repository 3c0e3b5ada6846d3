"""The items that a group answers while faults go by, and what is noted of each."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chaos.accounting import Book
from chaos.faults import Fault
from chaos.standing import RANKS
from chaos.workers import Load, checksum
from raycrew.cluster_core import ClusterError
from raycrew.tensor_transport import TransportError
from raycrew.worker_groups import MultiWorkerFuture, RayWorkerGroup, ResultTimeoutError, WorkerGroupError

LOADS = {"dispatch": 64, "transfer": 4 << 20}
ITEMS = 6
PAUSE_S = 0.005  # between items of a stream


@dataclass
class Work:
    """The items of one round, under way on so many ranks."""

    book: Book
    ranks: int = RANKS
    under_way: dict[str, MultiWorkerFuture[Any, Any]] = field(default_factory=dict)

    def send(self, fault: Fault, group: RayWorkerGroup) -> None:
        """Send items to all ranks, some that may run again and some that may not."""
        load: Load = np.full(LOADS.get(fault.moment, 64), fault.number % 251, np.uint8)
        for number in range(ITEMS):
            item, again = f"{fault.number}-{self.book.sent}", number % 2 == 0
            self.book.send(item, checksum(load), again=again)
            to = group.on(ranks=[number // 2 % self.ranks])
            self.under_way[item] = to.call("answer" if again else "once", item, load)

    def keep_on(
        self, fault: Fault, group: RayWorkerGroup, until: Callable[[], bool], deadline_s: float
    ) -> None:
        """Send and collect until something is so; the next items are sent before the last are collected."""
        while not until():
            before, self.under_way = self.under_way, {}
            self.send(fault, group)
            self._take(before, deadline_s)

    def balance(
        self, fault: Fault, group: RayWorkerGroup, until: Callable[[], bool], deadline_s: float
    ) -> None:
        """Have items answered by whoever is there until something is so.

        Those that may run again go through one stream, of which none may fail; after some of them comes one
        that may not.
        """
        load: Load = np.full(LOADS["dispatch"], fault.number % 251, np.uint8)
        sent: list[str] = []

        def items() -> Iterator[str]:
            while not until():
                time.sleep(PAUSE_S)
                sent.append(f"{fault.number}-{self.book.sent}")
                self.book.send(sent[-1], checksum(load), again=True)
                yield sent[-1]

        more = {"load": load}
        for index, (item, value) in group.balancer.as_completed(
            "answer", items(), timeout=deadline_s, common_kwargs=more
        ):
            self.book.answer(item if item == sent[index] else f"{sent[index]} as {item}", value)
            if index % ITEMS == 0:
                self._once(f"{fault.number}-{self.book.sent}", group, load, deadline_s)

    def _once(self, item: str, group: RayWorkerGroup, load: Load, deadline_s: float) -> None:
        self.book.send(item, checksum(load), again=False)
        with taken(self.book, item) as answer:
            future = group.balancer.call("once", item, load)
            ((_, answer.value),) = future.get_results(timeout=deadline_s)

    def collect(self, deadline_s: float) -> None:
        """Take what comes back."""
        self._take(self.under_way, deadline_s)

    def _take(self, under_way: dict[str, MultiWorkerFuture[Any, Any]], deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        while under_way:
            item, future = under_way.popitem()
            with taken(self.book, item) as answer:
                ((_, answer.value),) = future.get_results(timeout=max(0.0, until - time.monotonic()))


@dataclass
class Answer:
    """What is answered, once it is known."""

    value: object = None


@contextlib.contextmanager
def taken(book: Book, item: str) -> Iterator[Answer]:
    """Write the answer of an item into the book, or the error that its block raises.

    An error of the packages' own names the call; that nothing came before the deadline is no answer, and
    neither is an error that somebody else raised.
    """
    answer = Answer()
    try:
        yield answer
    except (WorkerGroupError, ClusterError, TransportError) as error:
        book.fail(item, error, named=not isinstance(error, ResultTimeoutError))
    except Exception as error:  # noqa: BLE001 - it is told of
        book.fail(item, error, named=False)
    else:
        book.answer(item, answer.value)
