"""The directory of versions: one record, asked by threads of this process or through a small actor."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from raycrew.tensor_transport import _ray
from raycrew.tensor_transport._bytes import Closing
from raycrew.tensor_transport.errors import (
    DirectoryLostError,
    TransportError,
    TransportTimeoutError,
)
from raycrew.tensor_transport.weights._directory.actor import (
    ANSWER_S,
    ActorEdge,
    DirectoryActor,
    Fanout,
    Said,
    seconds_left,
)
from raycrew.tensor_transport.weights._directory.record import Record
from raycrew.tensor_transport.weights._directory.versions import VersionStatus

P = ParamSpec("P")
R = TypeVar("R")

_POLL_S = 5.0


class Until:
    """How long to wait: some seconds from now, and no longer than an event says."""

    def __init__(self, timeout_s: float | None, stopped: threading.Event | None = None) -> None:
        self.timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._stopped = stopped

    def left(self, most_s: float) -> float:
        """Seconds that are left, at most so many."""
        return most_s if self._deadline is None else max(0.0, min(most_s, self._deadline - time.monotonic()))

    def is_over(self) -> bool:
        """Whether nothing is left."""
        stopped = self._stopped is not None and self._stopped.is_set()
        return stopped or (self._deadline is not None and time.monotonic() >= self._deadline)


class _Edge(Protocol):
    def ask(self, method: str, args: tuple[Any, ...], timeout_s: float) -> Any: ...

    def tell(self, method: str, args: tuple[Any, ...]) -> None: ...

    def poll(self, method: str, args: tuple[Any, ...], wait_s: float, said: Said | None = None) -> Any: ...

    def close(self) -> None: ...


class WeightDirectory(Closing):
    """Which versions of a model's weights there are, who holds which, and what became of an update.

    One for each trainer: its ranks publish through it, and generators find versions in it by themselves, also
    late or after a restart. It decides: a version that `sync_weights` began commits when all receivers have
    loaded it, and is aborted for all when one fails, is silent for `lease_s`, or the deadline passes. It
    holds the last `keep` committed versions; with `keep=0` buckets go as soon as all receivers have them, and
    who comes late finds nothing until the next update.

    Made by `start()` (an actor, picklable, for processes of a Ray cluster) or `local()` (for threads).
    """

    def __init__(self, edge: _Edge) -> None:
        self._edge = edge

    @classmethod
    def start(
        cls,
        *,
        keep: int = 1,
        lease_s: float = 60.0,
        fanout: Fanout = "auto",
        name: str | None = None,
    ) -> Self:
        """Start the actor; it ends with `close`, or with whoever started it.

        Args:
            keep: How many committed versions stay available.
            lease_s: How long a publisher, or a receiver that fetches, may be silent before it counts as dead.
            fanout: How many nodes fetch from one in a relay: 1 is a chain, None no relay, "auto" what is
                earliest done.
            name: For `find`.
        """
        _check(keep, lease_s, fanout)
        return cls(ActorEdge(_ray.start_actor(DirectoryActor, name, keep, lease_s, fanout)))

    @classmethod
    def local(cls, *, keep: int = 1, lease_s: float = 60.0, fanout: Fanout = "auto") -> Self:
        """A directory for the threads of this process."""
        _check(keep, lease_s, fanout)
        return cls(_LocalEdge(Record(keep, lease_s, fanout)))

    @classmethod
    def find(cls, name: str) -> Self:
        """The directory that was started under a name.

        Raises:
            DirectoryLostError: There is none.
        """
        return cls(ActorEdge(_ray.find_actor(name)))

    @property
    def latest(self) -> int | None:
        """The last committed version that is kept."""
        return self.ask(Record.newest)

    def status(self) -> tuple[VersionStatus, ...]:
        """Versions that are published, kept or were aborted lately, and who holds them."""
        return self.ask(Record.status)

    def ask(
        self,
        method: Callable[Concatenate[Record, float, P], R],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """The answer of a method of the record, at once.

        Raises:
            DirectoryLostError: It is gone, or does not answer.
        """
        if kwargs:
            raise TypeError("arguments of the record are given by position")
        found: R = self._edge.ask(method.__name__, args, ANSWER_S)
        return found

    def wait(
        self,
        method: Callable[Concatenate[Record, float, P], R | None],
        until: "Until | float | None",
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """The answer of a method of the record, as soon as it has one.

        Raises:
            TransportTimeoutError: It has none in time.
            DirectoryLostError: It is gone, or does not answer.
        """
        if kwargs:
            raise TypeError("arguments of the record are given by position")
        return self.say_and_wait(None, method, until, *args, **kwargs)

    def tell(
        self,
        method: Callable[Concatenate[Record, float, P], object],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Say something without waiting for an answer; what is wrong with it shows in what is asked next.

        Raises:
            DirectoryLostError: It is closed.
        """
        if kwargs:
            raise TypeError("arguments of the record are given by position")
        self._edge.tell(method.__name__, args)

    def say_and_wait(
        self,
        said: tuple[Callable[..., object], tuple[Any, ...]] | None,
        method: Callable[Concatenate[Record, float, P], R | None],
        until: "Until | float | None",
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """The same after something was said once, with its arguments: in one message, where there is time.

        Raises:
            TransportTimeoutError: It has none in time.
            DirectoryLostError: It is gone, or does not answer.
        """
        if kwargs:
            raise TypeError("arguments of the record are given by position")
        until = until if isinstance(until, Until) else Until(until)
        first: Said | None = None if said is None else (said[0].__name__, said[1])
        while True:
            found: R | None = self._edge.poll(method.__name__, args, until.left(_POLL_S), first)
            first = None
            if found is not None:
                return found
            if until.is_over():
                raise TransportTimeoutError(
                    f"the directory had no {method.__name__} within {until.timeout_s} s"
                )

    def close(self) -> None:
        """End the actor, and with it what the directory holds; idempotent."""
        self._edge.close()


def _check(keep: int, lease_s: float, fanout: Fanout) -> None:
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
        raise ValueError(f"keep is a number of versions, and must not be negative; got {keep!r}")
    if not lease_s > 0:
        raise ValueError(f"lease_s must be above 0, got {lease_s}")
    is_number = isinstance(fanout, int) and not isinstance(fanout, bool) and fanout >= 1
    if fanout not in (None, "auto") and not is_number:
        raise ValueError(f'fanout must be "auto", None or at least 1, got {fanout!r}')


class _LocalEdge:
    """A record behind a lock."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._changed = threading.Condition()
        self._closed = False
        self._pid = os.getpid()

    def ask(self, method: str, args: tuple[Any, ...], timeout_s: float) -> Any:  # noqa: ARG002
        with self._entered():
            try:
                return getattr(self._record, method)(time.monotonic(), *args)
            finally:
                self._changed.notify_all()

    def tell(self, method: str, args: tuple[Any, ...]) -> None:
        with self._entered(), contextlib.suppress(TransportError):
            self.ask(method, args, ANSWER_S)

    def poll(self, method: str, args: tuple[Any, ...], wait_s: float, said: Said | None = None) -> Any:
        deadline = time.monotonic() + wait_s
        with self._entered():
            if said is not None:
                self.ask(*said, wait_s)
            found = self.ask(method, args, wait_s)  # What it changed concerns others, whatever it answers.
            while found is None and (now := time.monotonic()) < deadline:
                self._changed.wait(seconds_left(now, deadline, self._record))
                found = getattr(self._record, method)(time.monotonic(), *args)
                if found is not None:
                    self._changed.notify_all()
            return found

    def close(self) -> None:
        self._closed = True

    def _entered(self) -> threading.Condition:
        if self._closed:
            raise DirectoryLostError("this WeightDirectory is closed")
        if os.getpid() != self._pid:
            raise TransportError(
                f"this WeightDirectory is that of process {self._pid}: start() one for other processes"
            )
        return self._changed
