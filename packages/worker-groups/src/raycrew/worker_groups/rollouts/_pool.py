"""A pool of workers that roll prompts out."""

import threading
import weakref
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from contextlib import ExitStack
from os import PathLike
from types import MappingProxyType, TracebackType
from typing import Any, Self

from raycrew.cluster_core import Cluster
from raycrew.worker_groups._group import RayWorkerGroup
from raycrew.worker_groups._start import RayWorkerBuilder
from raycrew.worker_groups.errors import WorkerGroupClosedError
from raycrew.worker_groups.rollouts._collection import RolloutCollection
from raycrew.worker_groups.rollouts._delivery import Delivery, JsonLines, Progress
from raycrew.worker_groups.rollouts._engine import (
    Company,
    Ended,
    Engine,
    Limits,
    OnError,
    Prompts,
    Retries,
    RolloutCalls,
    check_prompts,
)
from raycrew.worker_groups.rollouts._in_worker import WATCH, RolloutWorker, check_columns
from raycrew.worker_groups.rollouts._options import PoolOptions, path_of
from raycrew.worker_groups.rollouts._telling import Tally
from raycrew.worker_groups.rollouts._values import Wishes
from raycrew.worker_groups.rollouts.samples import SampleQueue

_END_S = 5.0


class RolloutPool:
    """Runs a coroutine of the user's for each prompt of a stream, on the workers of a group.

    A rollout is `async def rollout(prompt)`, or with a state `async def rollout(state, prompt)`: as many
    turns, calls of tools and of models as it likes. Many of them run beside one another in each worker, and a
    worker has one state, which is made when it starts (clients, tools, a verifier).

    Where a rollout fails, it is tried again on another worker; where there is no other, in a state that is
    made for it alone. One that runs past its deadline is cancelled; where it goes on all the same, or blocks
    its worker's event loop, its process is ended with all that it has started, and replaced. Rollouts that
    were in the same process run again elsewhere, which does not count as an attempt of theirs. Those that
    were in a process that died by itself run again one by one, each alone in a worker, where it shows whose
    fault it was.

    Args:
        cluster: Where to place the workers; a `RayVirtualCluster`, say.
        rollout: The coroutine function, or its import path, such as "package.module:rollout".
        state: Makes a worker's state, without arguments: a class, a function, or an import path of one.
        samples_per_prompt: How many rollouts each prompt has; they are handed out together, in order.
        deadline_s: How long a rollout may take; None for as long as it takes.
        cancel_grace_s: How long it may take to end once it was cancelled.
        retries: How often a rollout is tried again that was late, or whose process died.
        retry_errors: Whether one that has raised is tried again, too.
        on_error: What a rollout does that has failed as often as it may be tried: "raise" ends the collection
            with a `RolloutFailedError`, and "return" leaves its place in the group empty.
        in_flight_per_worker: Most rollouts that a worker has at a time.
        max_in_flight: Most prompts that were pulled from the stream and not handed out; by default twice as
            many as the workers hold.
        max_restarts: How often workers are replaced; see `RayWorkerGroup`.
        name: What it is called in messages, metrics and timelines.
        group: Further options of the `RayWorkerGroup`, such as `{"workers_per_node": 4}`.

    Raises:
        TypeError: An option is of a wrong kind, or the coroutine can't be pickled.
        ValueError: It is out of range.
        WorkerFailureError: A worker did not start: its state can't be made, say.

    Examples:
        >>> async def rollout(prompt: str) -> dict[str, str]:
        ...     return {"answer": prompt.upper()}
        >>> with (
        ...     RayVirtualCluster([1], use_gpus=False) as cluster,
        ...     RolloutPool(cluster, rollout, samples_per_prompt=2) as pool,
        ... ):
        ...     for group in pool.collect(["a"]):
        ...         print(group.id, group.samples)
        0 ({'answer': 'A'}, {'answer': 'A'})
    """

    def __init__(
        self,
        cluster: Cluster,
        rollout: Callable[..., Any] | str,
        state: Callable[[], Any] | str | None = None,
        *,
        samples_per_prompt: int = 1,
        deadline_s: float | None = None,
        cancel_grace_s: float = 5.0,
        retries: int = 1,
        retry_errors: bool = False,
        on_error: OnError = "raise",
        in_flight_per_worker: int = 16,
        max_in_flight: int | None = None,
        max_restarts: int = 100,
        name: str = "rollouts",
        group: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._options = PoolOptions.among(locals())
        options: dict[str, Any] = {
            **self._options.group,
            "init": {"code": self._options.code},
            "name_prefix": name,
            "enable_load_balancing": True,
            "load_balancing_strategy": "least_outstanding",
            "restart_on_failure": max_restarts > 0,
            "max_restarts": max_restarts,
            "min_workers": 1 if max_restarts > 0 else None,
        }
        worker = RayWorkerBuilder(RolloutWorker).options(concurrency_groups={WATCH: 1})
        self._collections: weakref.WeakSet[RolloutCollection] = weakref.WeakSet()
        self._is_closed = False
        self._ended: Ended = {}
        self._company = Company()
        self.group = RayWorkerGroup(cluster, worker, **options)

    def collect(
        self,
        prompts: Iterable[Any] | AsyncIterable[Any],
        *,
        ids: Callable[[Any], str | int] | None = None,
        folder: str | PathLike[str] | None = None,
        jsonl: str | PathLike[str] | None = None,
        queue: SampleQueue | None = None,
        fsync: bool = False,
    ) -> RolloutCollection:
        """Have prompts rolled out, beginning now.

        The stream is read one prompt at a time, and only while there is room; an async one in the running
        event loop, if there is one. It may be endless. Where it raises, what is under way is handed out, and
        then its error raised.

        Args:
            prompts: The stream.
            ids: Gives a prompt's id, which no other has; by default its position.
            folder: Where to write down what is done. A later collection with the same prompts in that folder
                goes on where this one was, however it ended: what is done is not rolled out again, and what
                was not handed out comes first.
            jsonl: A file that gets one line for each prompt: {"id": …, "samples": […]}. Prompts that have a
                line there are not rolled out again.
            queue: Gets the samples: rollouts return a `RolloutSample`. Failed ones have none.
            fsync: Whether the folder and the file outlive a failure of the machine, too, not just of this
                process.

        Raises:
            TypeError: An argument is of a wrong kind.
            ValueError: The queue holds fewer samples than a prompt has, or a column can't stand in a file.
            RolloutFileError: The folder or file is in use, damaged, or of another collection.
            WorkerGroupClosedError: The pool was closed.
        """
        if self._is_closed:
            raise WorkerGroupClosedError(f"{self._options.name} was closed")
        check_prompts(prompts, ids)
        if queue is not None:
            self._check_queue(queue, has_file=jsonl is not None)
        where, file = path_of("folder", folder), path_of("jsonl", jsonl)
        with ExitStack() as undone:
            of_it = self._options.of_collection(
                has_ids=ids is not None, has_file=file is not None, has_queue=queue is not None
            )
            progress = Progress(where, of_it, fsync=fsync)
            undone.callback(progress.close)
            lines = None if file is None else JsonLines(file, is_synced=fsync)
            if lines is not None:
                undone.callback(lines.close)
            wishes = Wishes(lines is not None, None if queue is None else tuple(queue.columns))
            engine = self._engine(prompts, ids, progress, lines, wishes)
            delivery = Delivery(progress.run, lines, queue, lambda: engine.is_stopped)
            collection = RolloutCollection(engine, progress, delivery)
            undone.pop_all()
        self._collections.add(collection)
        return collection

    def _check_queue(self, queue: Any, *, has_file: bool) -> None:
        if not isinstance(queue, SampleQueue):
            raise TypeError(f"queue is a SampleQueue, not {queue!r}")
        if has_file:
            check_columns(queue.columns)
        if (most := queue.max_samples) is not None and most < self._options.samples_per_prompt:
            n = self._options.samples_per_prompt
            raise ValueError(
                f"the queue holds {most} samples at most, but a prompt has {n}, which come together"
            )

    def _engine(
        self, prompts: Any, ids: Any, progress: Progress, lines: JsonLines | None, wishes: Wishes
    ) -> Engine:
        options, wake, tally = self._options, threading.Event(), Tally(self._options.name)
        limits = Limits(options.deadline_s, options.cancel_grace_s)
        retries = Retries(options.retries, options.retry_errors)
        known = self._ended, self._company
        calls = RolloutCalls(self.group, limits, wishes, retries, wake, tally, *known)
        bounds = options.bounds(self.group.world_size)
        written = None if lines is None else lines.ids
        stream = Prompts(prompts, ids, wake.set)
        return Engine(calls, stream, progress, written, bounds, options.on_error, wake, tally)

    def close(self) -> None:
        """Give up what is under way, and end the workers; idempotent."""
        self._is_closed = True
        with ExitStack() as ending:  # to its end, whatever is raised on the way
            ending.callback(self.group.shutdown, timeout=_END_S)
            for collection in list(self._collections):
                ending.callback(collection.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> str:
        raise TypeError("a pool stays in its process and can't be pickled: does its rollout hold it?")

    def __repr__(self) -> str:
        workers = "1 worker" if self.group.world_size == 1 else f"{self.group.world_size} workers"
        return f"RolloutPool({self._options.name!r}, {workers})"
