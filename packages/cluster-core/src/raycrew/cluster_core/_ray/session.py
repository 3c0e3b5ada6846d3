"""Which connection to Ray something belongs to."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import ray

from raycrew.cluster_core._ray.compat import client_id, is_client, job_id, without_connecting
from raycrew.cluster_core.errors import ClusterClosedError

_ENDING_S = 5.0
_LOOK_S = 0.02


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

        Raises:
            ClusterClosedError: It is not, or by another session.
        """
        current = type(self).current()
        if current == self:
            return
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
            return without_connecting(ray.get)(refs, timeout=timeout)

    def wait(
        self, refs: Sequence[Any], *, num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        """The same as `ray.wait`, over this session and no other one.

        Raises:
            ClusterClosedError: It has ended, perhaps while this waited.
        """
        with self.while_connected():
            ready, pending = without_connecting(ray.wait)(
                list(refs), num_returns=num_returns, timeout=timeout
            )
        return ready, pending

    @contextmanager
    def while_connected(self) -> Iterator[None]:
        """What fails in here because the session has ended raises a `ClusterClosedError`, whatever Ray says.

        Raises:
            ClusterClosedError: The session had ended before, or has meanwhile.
        """
        self.check()
        try:
            yield
        except SystemExit:  # So Ray ends what waits, when its connection is about to end.
            self._await_end()
            raise
        except Exception:
            self.check()
            raise

    def _await_end(self) -> None:
        deadline = time.monotonic() + _ENDING_S
        while time.monotonic() < deadline:
            self.check()
            time.sleep(_LOOK_S)
