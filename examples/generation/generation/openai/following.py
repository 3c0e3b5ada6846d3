"""The driver's side of endpoints: one address for those of all replicas, wherever they are at the moment."""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ray.exceptions import RayActorError, RayError

from generation.group import Generators
from raycrew.cluster_core import ClusterError
from raycrew.worker_groups import (
    MultiWorkerFuture,
    ResultTimeoutError,
    WorkerFailureError,
    WorkerGroupError,
)
from raycrew.worker_groups.services import Endpoint, Proxy, ServiceClosedError

logger = logging.getLogger(__name__)

INTERVAL_S = 0.25
ANSWER_S = 5.0


@contextmanager
def one_endpoint(generators: Generators, **options: Any) -> Iterator[Endpoint]:
    """One endpoint for all replicas, which were started with `worker_options={"endpoint": …}`.

    Each request goes to one replica; `strategy="consistent_hash"` with a `key` has those of a conversation go
    to the one whose prefix cache knows it. A replica that dies is replaced, and found again. So is one
    that joins the group; one that leaves it gets no more requests.

    Args:
        generators: The replicas.
        **options: Of the `Proxy`: `strategy`, `key`, `token`, `host`, `port`, `timeout_s` and so on.

    Raises:
        GenerationError: They have no endpoints.
        ValueError: Options contradict one another.
    """
    followed = _Followed(generators)
    try:
        with Proxy(followed, **options) as proxy:
            yield proxy.endpoint
    finally:
        followed.end()


class _Followed:
    """Endpoints of replicas, asked for again and again, as one that is replaced has another.

    Those of replicas that are dead, or have left the group, are not kept; those that come are asked, too.
    """

    def __init__(self, generators: Generators) -> None:
        self._generators, self._group = generators, generators.group
        told = self._group.on(ranks=list(generators.leaders), timeout=60.0).call("endpoint")
        self._known = dict(zip(told.return_from_workers, told.get_results(), strict=True))
        self._asked: dict[int, MultiWorkerFuture[Endpoint]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look_again, name="endpoints", daemon=True)
        self._thread.start()

    def __call__(self) -> Sequence[Endpoint]:
        if self._stop.is_set():
            raise ServiceClosedError("the generators' endpoints are not followed any more")
        return list(self._known.values())

    def end(self) -> None:
        """Ask no more."""
        self._stop.set()
        self._thread.join(2 * ANSWER_S)

    def _look_again(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            leaders = self._generators.leaders
            for rank in self._known.keys() - leaders:
                del self._known[rank]
            self._asked = {rank: asked for rank, asked in self._asked.items() if rank in leaders}
            for rank in leaders:
                try:
                    self._look(rank)
                except (WorkerGroupError, ClusterError, RayError, ValueError) as error:
                    self._asked.pop(rank, None)
                    if isinstance(error, ResultTimeoutError):  # it is being replaced, whoever noticed that
                        self._known.pop(rank, None)
                    logger.info("the endpoint of replica %d can't be asked for now: %s", rank, error)

    def _look(self, rank: int) -> None:
        """Take in what a replica says; one that is slow is asked again, and holds nobody up for long.

        Raises:
            ResultTimeoutError: It is being replaced.
            WorkerFailureError: It has died, or its method raised.
        """
        if rank not in self._asked:
            self._asked[rank] = self._group.on(ranks=[rank], timeout=ANSWER_S).call("endpoint")
        asked = self._asked[rank]
        with suppress(ResultTimeoutError):
            if _has_died(asked.exception(timeout=INTERVAL_S)):
                self._known.pop(rank, None)  # first: what follows may wait until it was replaced
            (self._known[rank],) = asked.get_results(timeout=INTERVAL_S)
            del self._asked[rank]


def _has_died(failure: WorkerFailureError | None) -> bool:
    """Whether a worker is gone, whose port may be somebody else's by now."""
    return failure is not None and isinstance(failure.cause, RayActorError)
