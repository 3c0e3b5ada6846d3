"""A batch of samples in a consumer's hands."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from raycrew.worker_groups.errors import SampleQueueError
from raycrew.worker_groups.protocols import WeightVersions
from raycrew.worker_groups.rollouts.samples._asking import (
    Handed,
    Request,
    Wanted,
    adding,
    checked_ids,
    decode,
    going_on,
)
from raycrew.worker_groups.rollouts.samples._channels import Channel
from raycrew.worker_groups.rollouts.samples._options import QueueOptions, check_seconds
from raycrew.worker_groups.rollouts.samples._states import per_token


class SampleBatch(Mapping[str, Any]):
    """Samples that a queue has handed out: a mapping of columns, each with one row per sample.

    Nobody else has them until they are done, given back, or the batch's lease ends. As a context manager it
    is done at the end of its block, and given back if the block raises.

    Attributes:
        ids: The numbers of the samples in their queue.
        runs: Of each sample, which version of the weights has made how many of its tokens.
        versions_behind: Of each sample, how many versions it was behind when it was handed out; counted from
            the oldest version that has made a token of it, or where that was later, the last that scored it
            anew.
    """

    def __init__(self, options: QueueOptions, channel: Channel, wanted: Wanted, handed: Handed) -> None:
        self.ids, self.runs, self.versions_behind, self._rows = handed
        self._options, self._channel, self._lease = options, channel, wanted.lease
        self._is_used_up = not wanted.adds and not wanted.is_to_go_on
        self._decoded: dict[str, Any] = {}
        self._open = dict.fromkeys(self.ids)

    def __getitem__(self, column: str) -> Any:
        """The rows of a column: a list, or one handle where handles were put."""
        if column not in self._decoded:
            self._decoded[column] = decode(self._rows[column])
        return self._decoded[column]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        """Number of columns; `size` is that of samples."""
        return len(self._rows)

    def __bool__(self) -> bool:
        return bool(self.ids)

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.ids)

    def __repr__(self) -> str:
        return f"SampleBatch({self.size} samples, columns {', '.join(self._rows) or 'none'})"

    def token_versions(self, position: int) -> list[int]:
        """The version of the weights that has made each token of the sample at a position.

        Raises:
            ValueError: The sample was put without `lengths`.
        """
        return per_token(self.runs[position])

    def done(self, ids: Sequence[int] | None = None) -> None:
        """These samples (all that are left, by default) were used up: the queue holds them no longer.

        Raises:
            SampleLeaseError: The lease has ended meanwhile, so that others may have got them.
        """
        request = self._settling("done", ids)
        self._channel.ask(request, None)
        self._settled(request.arguments["ids"])

    async def done_async(self, ids: Sequence[int] | None = None) -> None:
        """As `done`, without blocking the event loop."""
        request = self._settling("done", ids)
        await self._channel.ask_async(request, None)
        self._settled(request.arguments["ids"])

    def give_back(self, ids: Sequence[int] | None = None) -> None:
        """Have these samples (all that are left, by default) handed out again.

        Raises:
            SampleLeaseError: The lease has ended meanwhile: they are back already.
        """
        request = self._settling("give_back", ids)
        self._channel.ask(request, None)
        self._settled(request.arguments["ids"])

    async def give_back_async(self, ids: Sequence[int] | None = None) -> None:
        """As `give_back`, without blocking the event loop."""
        request = self._settling("give_back", ids)
        await self._channel.ask_async(request, None)
        self._settled(request.arguments["ids"])

    def renew(self, lease_s: float) -> None:
        """Have the lease last so many seconds from now on.

        Raises:
            SampleLeaseError: It has ended already.
        """
        check_seconds("lease_s", lease_s)
        self._channel.ask(Request("renew", {"lease": self._lease, "lease_s": lease_s}), None)

    def add(self, columns: Mapping[str, Any], *, version: int | WeightVersions | None = None) -> list[int]:
        """Add the columns that this batch was asked for to add, one row per sample; see `SampleQueue.add`.

        Raises:
            SampleLeaseError: The lease has ended meanwhile, or these are other columns.
        """
        refused: list[int] = self._channel.ask(self._adding(columns, version), None)
        self._settled()
        return refused

    async def add_async(
        self, columns: Mapping[str, Any], *, version: int | WeightVersions | None = None
    ) -> list[int]:
        """As `add`, without blocking the event loop."""
        refused: list[int] = await self._channel.ask_async(self._adding(columns, version), None)
        self._settled()
        return refused

    def put(
        self,
        columns: Mapping[str, Any],
        *,
        version: int | WeightVersions,
        lengths: Sequence[int],
        partial: bool = False,
    ) -> list[int]:
        """Put rollouts that have gone on in place of the parts that `SampleQueue.resume` gave.

        Args:
            columns: The whole rows, one per sample; columns that are not named stay as they are.
            version: The version of the weights that has made what came anew.
            lengths: How many tokens each sample has now, with those of earlier versions.
            partial: Whether they are still parts, to go on with later.

        Returns:
            The samples that the queue no longer holds, as they had become too old.

        Raises:
            SampleLeaseError: The lease has ended meanwhile.
            ValueError: A sample has fewer tokens than before, or numbers of rows differ.
        """
        request = self._going_on(columns, version, lengths, partial)
        gone: list[int] = self._channel.ask(request, None)
        self._settled()
        return gone

    async def put_async(
        self,
        columns: Mapping[str, Any],
        *,
        version: int | WeightVersions,
        lengths: Sequence[int],
        partial: bool = False,
    ) -> list[int]:
        """As `put`, without blocking the event loop."""
        request = self._going_on(columns, version, lengths, partial)
        gone: list[int] = await self._channel.ask_async(request, None)
        self._settled()
        return gone

    def _adding(self, columns: Mapping[str, Any], version: Any) -> Request:
        return adding(self._options, self.ids, columns, version, self._lease)

    def _going_on(
        self, columns: Mapping[str, Any], version: Any, lengths: Sequence[int], partial: bool
    ) -> Request:
        return going_on(self._options, self.ids, columns, version, lengths, self._lease, partial=partial)

    def _settling(self, how: str, ids: Sequence[int] | None) -> Request:
        settled = list(self._open) if ids is None else checked_ids(ids)
        return Request(how, {"lease": self._lease, "ids": settled})

    def _settled(self, ids: Iterable[int] | None = None) -> None:
        for sample in list(self._open) if ids is None else ids:
            self._open.pop(sample, None)

    def _at_end(self, kind: type[BaseException] | None) -> str:
        return "done" if kind is None and self._is_used_up else "give_back"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            with suppress(*() if kind is None else (SampleQueueError,)):  # the block's own error counts
                getattr(self, self._at_end(kind))()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            with suppress(*() if kind is None else (SampleQueueError,)):
                await getattr(self, f"{self._at_end(kind)}_async")()
