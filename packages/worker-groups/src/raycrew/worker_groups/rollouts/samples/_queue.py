"""A queue of samples as producers and consumers hold it."""

import inspect
import time
from collections.abc import Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Self, Unpack

from raycrew.worker_groups.protocols import WeightVersions
from raycrew.worker_groups.rollouts.samples._asking import (
    Request,
    Wanted,
    adding,
    checked_keys,
    getting,
    putting,
)
from raycrew.worker_groups.rollouts.samples._batch import SampleBatch
from raycrew.worker_groups.rollouts.samples._channels import Channel, LocalChannel, RayChannel
from raycrew.worker_groups.rollouts.samples._coroutines import QueueCoroutines
from raycrew.worker_groups.rollouts.samples._keeping import Keeper, SampleStats
from raycrew.worker_groups.rollouts.samples._options import QueueKeywords, QueueOptions, count_of
from raycrew.worker_groups.rollouts.samples._states import Stale, number_of
from raycrew.worker_groups.rollouts.samples._telling import Teller, waiting


class SampleQueue(QueueCoroutines):
    """Samples between those who make them, those who add to them, and those who learn from them.

    Samples come by `put` with some columns; others may `add` columns to them later. `get` hands out samples
    that have the wanted columns, under a lease: until it ends nobody else gets them. They leave the queue
    once their batch is done. Where a consumer dies, its samples come back when its lease ends.

    Each sample carries the version of the weights that has made it, and a rollout that was interrupted that
    of each token. `get(..., max_staleness=k)` hands out no sample whose oldest token was made more than `k`
    versions before the newest version that the queue has been told of: by `advance`, by `get(version=)`, or
    by whoever has put a sample that it has made.

    Rows are values, which are pickled one by one and come back as copies, or columns of handles (such as an
    `RTensor`; see `RowHandles`), of which consumers get handles on just their rows. A handle is held until no
    sample in the queue needs it; whether that keeps its data alive is up to its backend. `ObjectRef`s may be
    rows, too. Thread-safe. This queue is of this process; `on_ray` makes one for all of a cluster.

    Args:
        columns: Names of the columns.
        name: What it is called in messages, metrics and timelines.
        stale: What becomes of samples that `get` finds too old: "keep" leaves them there for consumers who
            want older ones, "drop" drops them, and "rescore" takes the `rescored` columns from them, so that
            they are handed out to whoever adds those. Once these are there again, the sample's age counts
            from the version that has scored it.
        rescored: Those columns.
        shuffle_seed: Hand samples out shuffled, by a key that follows from the seed and a sample's number: of
            the samples that are there, the one with the least comes first. None for the order in which they
            came.
        shuffle_window: So many samples that came one after another are shuffled among themselves.
        max_samples: Most samples that are held; those who put more wait, and are served in the order in which
            they came, unless a consumer waits for what somebody else could put.
        max_memory: Most bytes of rows in memory, in bytes or as "8GB" or "8GiB"; handles don't count. Those
            who put more wait, or with `spill` the newest rows go to disk. Columns that are added to samples
            always find room.
        max_keys: How many keys of `put` are remembered: with a new one the oldest is forgotten, whether its
            sample is still held or not. None for all that there ever were.
        spill: Whether they go there: True for the folder of temporary files, or a folder. The files have no
            names, and are gone with the process; what no sample needs any more goes back to the disk before
            that, a megabyte at a time where the file system can (ext4, XFS, Btrfs and tmpfs can).
        directory: A folder in which rows and what becomes of samples are written down, for this user alone. A
            later queue of the same columns in that folder goes on where this one was, however it ended; all
            leases are over then. Rows are values, not handles, as what these stand for may end earlier.
        fsync: Whether each operation is on the disk itself before it returns: it then outlives a failure of
            the machine, too, not just the process.
        lease_s: How long a batch is a consumer's, where it does not say itself.

    Raises:
        TypeError: An option is of a wrong kind.
        ValueError: It is out of range, or does not go with another.
        SampleJournalError: The folder is in use, of a queue with other columns, damaged, or not this user's.
        OSError: A folder can't be written to.

    Examples:
        >>> queue = SampleQueue(["tokens", "reward"], stale="drop")
        >>> ids = queue.put({"tokens": [[5, 6], [7]]}, version=3)
        >>> with queue.get(2, columns=["tokens"], adds=["reward"]) as batch:
        ...     refused = batch.add({"reward": [float(len(tokens)) for tokens in batch["tokens"]]})
        >>> with queue.get(2, max_staleness=1) as batch:
        ...     print(batch["tokens"], batch["reward"], batch.versions_behind)
        [[5, 6], [7]] [2.0, 1.0] [0, 0]
    """

    def __init__(
        self,
        columns: Sequence[str],
        *,
        name: str = "samples",
        stale: Stale = "keep",
        rescored: Sequence[str] = (),
        shuffle_seed: int | None = None,
        shuffle_window: int = 4096,
        max_samples: int | None = None,
        max_memory: int | str | None = None,
        max_keys: int | None = 100_000,
        spill: bool | str | PathLike[str] = False,
        directory: str | PathLike[str] | None = None,
        fsync: bool = False,
        lease_s: float = 600.0,
    ) -> None:
        options = QueueOptions.among(locals())
        self._options = options
        self._channel: Channel = LocalChannel(Keeper(options, time.monotonic, Teller(name)))

    @classmethod
    def on_ray(
        cls, columns: Sequence[str], *, start_timeout_s: float = 60.0, **options: Unpack[QueueKeywords]
    ) -> Self:
        """A queue in an actor of its own, which ends with this process's part of the cluster.

        It can be passed to tasks and actors, in arguments or as part of other objects. Whoever has it puts,
        adds and gets; `close` ends the queue in the process that has made it, and elsewhere just its use.

        Args:
            columns: See `SampleQueue`.
            start_timeout_s: Deadline of its start.
            **options: See `SampleQueue`; a folder is one of the node that the actor is on.

        Raises:
            SampleQueueTimeoutError: The actor did not start in time; it is ended.
            WorkerGroupError: This process is not connected to Ray.
        """
        bound = inspect.signature(cls).bind(columns, **options)
        bound.apply_defaults()
        checked, queue = QueueOptions.among(bound.arguments), cls.__new__(cls)
        vars(queue).update(_options=checked, _channel=RayChannel.start(checked, start_timeout_s))
        return queue

    def put(
        self,
        columns: Mapping[str, Any],
        *,
        version: int | WeightVersions,
        lengths: Sequence[int] | None = None,
        partial: bool = False,
        keys: Sequence[str] | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """Put new samples; waits while there is no room.

        Args:
            columns: Some of the queue's columns, each with one row per sample.
            version: The version of the weights that has made them, or what holds these weights.
            lengths: How many tokens each has; needed where they are parts, and for `token_versions`.
            partial: Whether they are parts of rollouts that were interrupted: they are handed out by `resume`
                only, until all of a rollout is there.
            keys: A name of each sample's own. What was put under a name that the queue remembers (see
                `max_keys`) is not put again, so that a put of which nobody knows whether it was done can be
                made once more. A queue with a folder remembers names there.
            timeout_s: How long to wait for room, which those who waited before have first; None for no limit.

        Returns:
            The numbers of the samples; those that they got before, where keys were known.

        Raises:
            SampleQueueTimeoutError: There was no room in time, and nothing was put; or no answer came, and it
                may have been (`may_be_done`).
            SampleQueueEndedError: The queue has ended.
            SampleQueueClosedError: The queue was closed.
            TypeError: A column is no sequence of rows, or a row can't be kept.
            ValueError: Columns differ in length, the queue has no such column, or a key comes twice.
        """
        request = putting(self._options, columns, version, lengths, partial=partial, keys=keys)
        with waiting(self.name, "put", request.arguments["n"]), self._withdrawn(request.arguments["ticket"]):
            ids: list[int] = self._channel.ask(request, timeout_s)
        return ids

    def known(self, keys: Sequence[str]) -> list[str]:
        """Those of some keys that samples were put under, as far as the queue remembers.

        Raises:
            SampleQueueClosedError: The queue was closed.
            TypeError: A key is no string.
        """
        known: list[str] = self._channel.ask(Request("known", {"keys": checked_keys(keys)}), None)
        return known

    def add(
        self,
        ids: Sequence[int],
        columns: Mapping[str, Any],
        *,
        version: int | WeightVersions | None = None,
    ) -> list[int]:
        """Add columns to samples that lack them.

        Args:
            ids: The numbers of the samples.
            columns: The columns, each with one row per sample.
            version: The version of the weights that has computed them; needed for `rescored` columns.

        Returns:
            The numbers of samples that did not take them: no longer held, with such a column already, or in
            the hands of somebody else who adds it.

        Raises:
            SampleQueueClosedError: The queue was closed.
            TypeError: A column is no sequence of rows, or a row can't be kept.
            ValueError: Numbers of rows differ, a sample is named twice or never was, or there is no such
                column.
        """
        refused: list[int] = self._channel.ask(adding(self._options, ids, columns, version), None)
        return refused

    def get(
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
        """Get samples that nobody else has; waits until there are enough.

        Args:
            batch: How many.
            columns: The columns that they must have; by default all, or where columns are to be added, any.
            adds: Columns that they must lack, as they are to be added (`SampleBatch.add`); the samples stay
                in the queue then. Others may add other columns to them meanwhile.
            max_staleness: How many versions they may be behind; None for any number.
            version: A version that there is, or what holds it: as `advance` before.
            at_least: How many will do, should there be no more at the moment; by default `batch`.
            lease_s: How long they are the caller's; by default as the queue says.
            timeout_s: How long to wait; None for no limit.

        Returns:
            The samples; fewer than `at_least` only where the queue has ended, or where columns are added and
            it is full.

        Raises:
            SampleQueueTimeoutError: There were not enough in time; none was taken.
            SampleQueueEndedError: The queue has ended, and no such sample is left.
            SampleQueueClosedError: The queue was closed.
            ValueError: The queue has no such column, or a number is out of range.
        """
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
        return self._get(request, timeout_s)

    def resume(
        self,
        batch: int,
        *,
        max_staleness: int | None = None,
        at_least: int = 1,
        lease_s: float | None = None,
        timeout_s: float | None = None,
    ) -> SampleBatch:
        """Get parts of rollouts, to go on with under newer weights and to `put` into the batch; as `get`.

        Args:
            batch: How many, at most.
            max_staleness: How many versions the oldest token of each may be behind; None for any number.
            at_least: How many will do.
            lease_s: How long they are the caller's; by default as the queue says.
            timeout_s: How long to wait; None for no limit.
        """
        request = self._parts(batch, at_least, max_staleness, lease_s)
        return self._get(request, timeout_s)

    def _get(self, request: Request, timeout_s: float | None) -> SampleBatch:
        wanted: Wanted = request.arguments["wanted"]
        with waiting(self.name, "get", wanted.n), self._withdrawn(wanted.lease):
            handed = self._channel.ask(request, timeout_s)
        return SampleBatch(self._options, self._channel, wanted, handed)

    def advance(self, version: int | WeightVersions) -> int:
        """Tell that there is a version of the weights; returns the newest that anybody has told of."""
        newest: int = self._channel.ask(Request("advance", {"version": number_of(version)}), None)
        return newest

    def discard(self, max_staleness: int) -> int:
        """Drop samples that are further behind and in nobody's hands, whatever they lack; how many."""
        most = count_of("max_staleness", max_staleness, 0)
        n: int = self._channel.ask(Request("discard", {"max_staleness": most}), None)
        return n

    def end(self) -> None:
        """Put nothing more: consumers get what is left, in smaller batches, and then are told.

        With `stale="rescore"`, whoever adds `rescored` columns is told once no sample is left that may become
        too old: take the rest, or `close` the queue.
        """
        self._channel.ask(Request("end", {}), None)

    def stats(self) -> SampleStats:
        """What it holds, and what has happened so far."""
        stats: SampleStats = self._channel.ask(Request("stats", {}), None)
        return stats

    def close(self) -> None:
        """Hold nothing any more; idempotent. Those who wait get a `SampleQueueClosedError`."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"SampleQueue({self.name!r}, columns {', '.join(self._options.columns)})"
