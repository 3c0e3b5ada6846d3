"""Which server a request goes to, by the policies that balance calls over workers."""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from raycrew.worker_groups.balancing import LeastOutstanding, WorkerLoad, strategy_of
from raycrew.worker_groups.services._endpoint import Endpoint

#: A server that could not be reached gets no requests for so long.
DOWN_S = 0.5


class Choosing:
    """Chooses among the servers that there are at the moment; used by one thread.

    Args:
        endpoints: Tells where they are.
        strategy: A name ("least_outstanding", "round_robin", "consistent_hash"), or a function of loads and
            key, as of a `LoadBalancer`. Without a key, one that needs it leaves the choice to
            "least_outstanding".
        clock: The monotonic clock.

    Raises:
        ValueError: There is no such strategy, or it needs reports of resource use.
    """

    def __init__(
        self,
        endpoints: Callable[[], Sequence[Endpoint]],
        strategy: str | Callable[[Sequence[WorkerLoad], Any], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoints, self._clock = endpoints, clock
        self._strategy, self._without_key = strategy_of(strategy), LeastOutstanding()
        if self._strategy.needs_usage:
            raise ValueError(f"servers report no resource use, which the strategy {strategy!r} needs")
        self._outstanding: Counter[str] = Counter()
        self._down_until: dict[str, float] = {}

    @property
    def needs_key(self) -> bool:
        """Whether the strategy goes by a key."""
        return self._strategy.needs_key

    def choose(self, key: str | None) -> Endpoint | None:
        """A server; None where there is none at the moment."""
        now = self._clock()
        self._down_until = {url: until for url, until in self._down_until.items() if until > now}
        numbered = _numbered(self._endpoints())
        here = {number: one for number, one in numbered.items() if one.url not in self._down_until}
        if not here:
            return None
        loads = [WorkerLoad(number, self._outstanding[one.url]) for number, one in sorted(here.items())]
        by = self._without_key if key is None and self._strategy.needs_key else self._strategy
        return here[by.choose(loads, key)]

    def note_down(self, endpoint: Endpoint) -> None:
        """Take in that a server could not be reached, or did not answer to the end."""
        self._down_until[endpoint.url] = self._clock() + DOWN_S

    @contextmanager
    def counted(self, endpoint: Endpoint) -> Iterator[None]:
        """Within, a server has one request more."""
        self._outstanding[endpoint.url] += 1
        try:
            yield
        finally:
            self._outstanding[endpoint.url] -= 1
            if not self._outstanding[endpoint.url]:
                del self._outstanding[endpoint.url]


def _numbered(endpoints: Sequence[Endpoint]) -> dict[int, Endpoint]:
    """Servers by their ranks, which stay when ports change; by their addresses where ranks are no names."""
    by_rank = {one.rank: one for one in endpoints}
    return by_rank if len(by_rank) == len(endpoints) else {_number(one.url): one for one in endpoints}


def _number(url: str) -> int:
    """A number that stays when other servers come and go."""
    return int.from_bytes(hashlib.blake2b(url.encode(), digest_size=8).digest())
