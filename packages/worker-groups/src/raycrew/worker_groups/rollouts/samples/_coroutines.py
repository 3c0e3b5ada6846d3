"""What a queue is asked, without blocking the event loop."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from raycrew.worker_groups.errors import SampleQueueError
from raycrew.worker_groups.protocols import WeightVersions
from raycrew.worker_groups.rollouts.samples._asking import Request, Wanted, adding, getting, putting
from raycrew.worker_groups.rollouts.samples._batch import SampleBatch
from raycrew.worker_groups.rollouts.samples._channels import Channel
from raycrew.worker_groups.rollouts.samples._options import QueueOptions
from raycrew.worker_groups.rollouts.samples._telling import waiting


class QueueCoroutines:
    """The methods of a `SampleQueue` that may wait, as coroutines."""

    _options: QueueOptions
    _channel: Channel

    @property
    def name(self) -> str:
        """What it is called."""
        return self._options.name

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(self._options.columns)

    @property
    def max_samples(self) -> int | None:
        """Most samples that it holds, if there is a bound."""
        return self._options.max_samples

    async def put_async(
        self,
        columns: Mapping[str, Any],
        *,
        version: int | WeightVersions,
        lengths: Sequence[int] | None = None,
        partial: bool = False,
        keys: Sequence[str] | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """As `put`, without blocking the event loop."""
        request = putting(self._options, columns, version, lengths, partial=partial, keys=keys)
        with waiting(self.name, "put", request.arguments["n"]), self._withdrawn(request.arguments["ticket"]):
            ids: list[int] = await self._channel.ask_async(request, timeout_s)
        return ids

    async def add_async(
        self,
        ids: Sequence[int],
        columns: Mapping[str, Any],
        *,
        version: int | WeightVersions | None = None,
    ) -> list[int]:
        """As `add`, without blocking the event loop."""
        request = adding(self._options, ids, columns, version)
        refused: list[int] = await self._channel.ask_async(request, None)
        return refused

    async def get_async(
        self,
        batch: int,
        *,
        columns: Sequence[str] | None = None,
        adds: Sequence[str] = (),
        max_staleness: int | None = None,
        version: int | WeightVersions | None = None,
        at_least: int | None = None,
        lease_s: float | None = None,
        timeout_s: float | None = None,
    ) -> SampleBatch:
        """As `get`, without blocking the event loop."""
        request = getting(
            self._options,
            batch,
            at_least=at_least,
            columns=columns,
            adds=adds,
            max_staleness=max_staleness,
            version=version,
            lease_s=lease_s,
        )
        return await self._get_async(request, timeout_s)

    async def resume_async(
        self,
        batch: int,
        *,
        max_staleness: int | None = None,
        at_least: int = 1,
        lease_s: float | None = None,
        timeout_s: float | None = None,
    ) -> SampleBatch:
        """As `resume`, without blocking the event loop."""
        request = self._parts(batch, at_least, max_staleness, lease_s)
        return await self._get_async(request, timeout_s)

    def _parts(self, batch: int, at_least: int, max_staleness: int | None, lease_s: float | None) -> Request:
        return getting(
            self._options,
            batch,
            at_least=at_least,
            is_to_go_on=True,
            max_staleness=max_staleness,
            lease_s=lease_s,
        )

    async def _get_async(self, request: Request, timeout_s: float | None) -> SampleBatch:
        wanted: Wanted = request.arguments["wanted"]
        with waiting(self.name, "get", wanted.n), self._withdrawn(wanted.lease):
            handed = await self._channel.ask_async(request, timeout_s)
        return SampleBatch(self._options, self._channel, wanted, handed)

    @contextmanager
    def _withdrawn(self, who: str) -> Iterator[None]:
        """Where a caller waits no longer, nothing is done later, and what was handed out goes back."""
        try:
            yield
        except BaseException as error:
            if not _is_refusal(error):
                with suppress(SampleQueueError):
                    self._channel.tell(Request("withdraw", {"who": who}))
            raise


def _is_refusal(error: BaseException) -> bool:
    """Whether that was the queue's answer, after which nothing is done later."""
    if isinstance(error, SampleQueueError):
        return not error.may_be_done
    return isinstance(error, ValueError | TypeError)
