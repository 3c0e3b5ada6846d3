"""Which connection to Ray something belongs to."""

import asyncio
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import ray

from raycrew.cluster_core._ray.compat import (
    await_shutdown,
    client_id,
    is_client,
    is_forked,
    job_id,
    never_connecting,
    no_shutdown,
)
from raycrew.cluster_core._ray.parents import why_not
from raycrew.cluster_core.errors import ClusterClosedError

_ENDING_S = 10.0
_LONGEST_S = 1e9  # about 30 years
_LOOK_S, _LOOKS_APART_S = 0.0005, 0.02

_here = threading.local()


@dataclass(frozen=True, slots=True)
class Session:
    """This process's connection to Ray, as Ray itself names it.

    What talks to Ray keeps the session that it belongs to and checks it before each use: by itself Ray would
    connect again, perhaps to another cluster, and wait there for what only the first one has.

    Attributes:
        id: The cluster's session and the job in it, which a driver and its workers share; behind a `ray://`
            proxy the client's own id. Never the same again after a `ray.shutdown()`.
    """

    id: str

    @classmethod
    def current(cls) -> Self | None:
        """The session of this process, or None where it is not connected to Ray.

        Never connects and asks nobody, so it may be called often, and from any thread.
        """
        if is_client():
            return None if (found := client_id()) is None else cls(f"ray-client/{found}")
        return None if (found := job_id()) is None else cls(found)

    def check(self) -> None:
        """Make sure that this process is still connected to Ray by this session.

        Where another thread is ending it, this raises once that is over.

        Raises:
            ClusterClosedError: It is not, or by another session.
        """
        if type(self).current() == self:
            return
        if is_forked():
            raise ClusterClosedError(why_not())
        await_shutdown(_ENDING_S)
        current = type(self).current()
        now = "this process is not connected to Ray" if current is None else f"now it is {current.id}"
        raise ClusterClosedError(
            f"the connection to Ray that this belongs to, {self.id}, has ended; {now}. What was made over it "
            "is gone: connect with init_ray() if need be, and make it anew"
        )

    def get(self, refs: Any, *, timeout: float | None = None) -> Any:
        """The same as `ray.get`, over this session and no other one.

        Raises:
            ClusterClosedError: It has ended, perhaps while this waited.
        """
        with self.while_connected():
            left = self._await_ready(refs, timeout) if self._is_beside() else timeout
            return ray.get(refs, timeout=_countable(left))

    def wait(
        self,
        refs: Sequence[Any],
        *,
        num_returns: int = 1,
        timeout: float | None = None,
        fetch_local: bool = True,
    ) -> tuple[list[Any], list[Any]]:
        """The same as `ray.wait`, over this session and no other one.

        Without `fetch_local` what is ready may be on another node, and stays there.

        Raises:
            ClusterClosedError: It has ended, perhaps while this waited.
        """
        with self.while_connected():
            if self._is_beside():
                return self._look_until(list(refs), num_returns, timeout, fetch_local)
            return _ready(refs, num_returns, timeout, fetch_local)

    @contextmanager
    def while_connected(self) -> Iterator[None]:
        """What is asked of Ray in here goes over this session, and never makes Ray connect by itself.

        What fails because it has ended raises a `ClusterClosedError`, whatever Ray says.

        Raises:
            ClusterClosedError: The session had ended before, or has meanwhile.
        """
        self.check()
        try:
            with never_connecting():
                yield
        except SystemExit:  # So Ray ends what waits, when its connection is about to end.
            await_shutdown(_ENDING_S)
            self.check()
            raise
        except Exception:
            self.check()
            raise

    @staticmethod
    def check_wanted() -> None:
        """Make sure that nobody has given up what this thread does; for waits that are not for Ray.

        Raises:
            asyncio.CancelledError: This is within an `until_set` whose event is set.
        """
        given_up = getattr(_here, "given_up", None)
        if given_up is not None and given_up.is_set():
            raise asyncio.CancelledError

    @staticmethod
    @contextmanager
    def until_set(given_up: threading.Event | None) -> Iterator[None]:
        """Within, waits of this thread end with an `asyncio.CancelledError` once an event is set.

        Only a thread beside the main one that is not behind a `ray://` proxy can give up so; others wait on.

        Args:
            given_up: The event, in place of one from around this; None for none, as a clean-up needs it.
        """
        before = getattr(_here, "given_up", None)
        _here.given_up = given_up
        try:
            yield
        finally:
            _here.given_up = before

    def _is_beside(self) -> bool:
        """Whether `ray.shutdown()` may well come from another thread while this one waits.

        Ray frees what a thread that waits within it uses: then the process ends, or reads what is not there.
        """
        return threading.current_thread() is not threading.main_thread() and not is_client()

    def _look_until(
        self, refs: list[Any], num_returns: int, timeout: float | None, fetch_local: bool = True
    ) -> tuple[list[Any], list[Any]]:
        """Look now and then, as long as no shutdown is under way; the pause is a twentieth of the time."""
        began = time.monotonic()
        while True:
            with no_shutdown():
                self.check()
                ready, pending = _ready(refs, num_returns, 0, fetch_local)
            self.check_wanted()
            waited = time.monotonic() - began
            left = math.inf if timeout is None else timeout - waited
            if len(ready) >= num_returns or left <= 0:
                return ready, pending
            time.sleep(min(max(waited / 20, _LOOK_S), _LOOKS_APART_S, left))

    def _await_ready(self, refs: Any, timeout: float | None) -> float | None:
        """Wait until what is to be got is there; gives the seconds that are left."""
        began = time.monotonic()
        wanted = list(refs) if isinstance(refs, Sequence) else [refs]
        wanted = list(dict.fromkeys(ref for ref in wanted if isinstance(ref, ray.ObjectRef)))
        if wanted:
            self._look_until(wanted, len(wanted), timeout)
        return None if timeout is None else max(0.0, timeout - (time.monotonic() - began))


def _ready(
    refs: Sequence[Any], num_returns: int, timeout: float | None, fetch_local: bool
) -> tuple[list[Any], list[Any]]:
    time_s = _countable(timeout)
    return ray.wait(list(refs), num_returns=num_returns, timeout=time_s, fetch_local=fetch_local)


def _countable(timeout: float | None) -> float | None:
    """A time as Ray takes it, which counts whole milliseconds in 64 bits: None for one that is too long."""
    return None if timeout is None or timeout > _LONGEST_S else timeout
