"""Groups that get fewer or more workers while they are used."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral

from raycrew.cluster_core import Claim
from raycrew.worker_groups._calls import GroupShape, dispatch_single
from raycrew.worker_groups._group.life import Lifecycle
from raycrew.worker_groups._health import checked_time
from raycrew.worker_groups._start import GroupSpec, Layout, Started
from raycrew.worker_groups.errors import WorkerGroupError
from raycrew.worker_groups.sharding import NamedSharding, SeatPlan, resized


@dataclass(frozen=True, slots=True)
class Resized:
    """What became of a group's ranks.

    Attributes:
        added: Ranks that are new.
        removed: Ranks that are no more.
        cut: Removed ranks whose workers were killed, as they had not ended when their time was over.
    """

    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    cut: tuple[int, ...] = ()


class Resizing:
    """Gets fewer or more workers."""

    _spec: GroupSpec
    _claim: Claim
    _started: Started
    _life: Lifecycle

    @abstractmethod
    def _open(self) -> GroupShape:
        """Raise if the group was shut down."""

    @abstractmethod
    def _grow(self, n: int) -> None:
        """Start workers as ranks up to n - 1; when it raises before they are the group's, none is left."""

    @abstractmethod
    def _shrink(self, n: int, cleanup_method: str | None, timeout_s: float) -> tuple[int, ...]:
        """End the workers of ranks from n on, which call a method first; gives those that were killed."""

    @property
    def absent_ranks(self) -> tuple[int, ...]:
        """Ranks without which the group goes on until they have been replaced; see `min_workers`."""
        least, absent = self._spec.options.min_workers, self._life.replaced
        if least is None or len(self._started.ranks) - len(absent) < least:
            return ()
        return tuple(sorted(absent))

    def resize(self, n: int, *, cleanup_method: str | None = None, timeout: float = 30.0) -> Resized:
        """Give the group `n` workers, while it is used; for ranks that do not need each other.

        Workers that stay keep their ranks and their state. New ones are started on free bundles of the same
        cluster, in its order, and get the ranks after the last one; those that go are the last ranks, and
        their bundles are free for others once their processes are gone. Each change is a new generation for
        all, with another `world_size` and another master port: workers hear of it as of a restart (see
        `restart_failed_workers`). One thread changes a group at a time; others that would wait.

        While new workers start, calls go on; while all hear of the generation, calls wait, as in a restart.
        A call that waited is not sent where its ranks are no more, or where it was for all of them; it raises
        a `GroupResizedError`. Calls that removed workers are in have `timeout` seconds to end; whoever waits
        for one that takes longer gets a `WorkerFailureError`, and `on_worker_failure` is not told of it.

        Args:
            n: How many workers there are to be; at least one.
            cleanup_method: Method to call on each removed worker after its calls, without arguments: one that
                closes a `WeightReceiver`, say. What it raises is logged.
            timeout: Seconds that removed workers may take for that, and to end by themselves.

        Returns:
            The ranks that are new, those that are no more, and those of which calls were cut.

        Raises:
            TypeError: `n` is no whole number, `timeout` no number, or the clean-up method needs arguments.
            UnknownMethodError: The class has no such clean-up method.
            ValueError: It is less than one, or than `min_workers`; the cluster has fewer bundles; or the
                group has several axes.
            BundlesOccupiedError: Too few bundles are free; the group is as it was.
            WorkerGroupError: Ranks are tied, or one that is to stay is dead; the group is as it was.
            WorkerFailureError: A new worker failed or was late; the group is as it was. Or `on_generation`
                failed on a rank: the group has its new size, and `renew_rendezvous()` tries that again.
            WorkerGroupClosedError: The group was shut down, perhaps meanwhile; no new worker is left.
        """
        _check_count("n", n)
        return self._resized(lambda _: n, cleanup_method, timeout)

    def add_workers(self, count: int = 1) -> Resized:
        """Start further workers; see `resize`."""
        _check_count("count", count)
        return self._resized(lambda size: size + count, None, 0.0)

    def remove_workers(
        self, count: int = 1, *, cleanup_method: str | None = None, timeout: float = 30.0
    ) -> Resized:
        """End the workers of the last ranks; see `resize`."""
        _check_count("count", count)
        return self._resized(lambda size: size - count, cleanup_method, timeout)

    def _resized(self, wanted: Callable[[int], int], cleanup_method: str | None, timeout_s: float) -> Resized:
        timeout_s = checked_time("timeout", timeout_s)
        self._life.check_owner("resize")
        shape = self._open()
        self._check_elastic()
        if cleanup_method is not None:
            dispatch_single(shape, cleanup_method, (), {})
        done: list[Resized] = []

        def work() -> list[int]:
            before = len(self._started.ranks)
            after = int(wanted(before))
            least = self._spec.options.min_workers or 1
            if after < least:
                said = f"{self._spec.name!r} has {before} worker{'' if before == 1 else 's'}"
                raise ValueError(f"{said}, and would have {after}; there are to be {least} at least")
            if after > before:
                self._grow(after)
            cut = self._shrink(after, cleanup_method, timeout_s) if after < before else ()
            done.append(Resized(tuple(range(before, after)), tuple(range(after, before)), cut))
            return []

        self._life.restart(work, "resize", shared=False)
        return done[0]

    def _check_elastic(self) -> None:
        name, options = self._spec.name, self._spec.options
        layout = Layout(self._spec, self._claim, self._started)
        if tied := [ranks for ranks in layout.tied_groups if len(ranks) > 1]:
            raise WorkerGroupError(
                f"{name!r} can't get fewer or more workers: ranks {tied[0]} are tied, as parts of one model"
            )
        if options.sharding_annotations is not None:
            resized(options.sharding_annotations, 1)


def check_min_workers(least: int | None, plan: SeatPlan, axes: NamedSharding | None) -> None:
    """Check that a group can go on without some of its workers.

    Raises:
        ValueError: It has fewer, ranks are tied, or there are several axes.
    """
    if least is None:
        return
    if least > len(plan.seats):
        raise ValueError(f"min_workers is {least}, of {len(plan.seats)} workers")
    if tied := [group for group in plan.tied_groups if len(group) > 1]:
        raise ValueError(f"min_workers= is for ranks that need no others; {tied[0]} are tied")
    if axes is not None:
        resized(axes, least)


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | Integral):
        raise TypeError(f"{name} is a whole number of workers, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} is {value}; there is at least one worker")
