"""The end of a group: a clean-up on each worker, the end of all that they started, and their bundles."""

import logging
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayError

from raycrew.worker_groups._calls import (
    Closing,
    Dispatch,
    GroupShape,
    MultiWorkerFuture,
    deadline_after,
    dispatch_single,
    left,
)
from raycrew.worker_groups._group.life.bundles import Crew, end_and_release, log_left
from raycrew.worker_groups._group.life.states import Lifecycle
from raycrew.worker_groups._health import Ended, look_before_end
from raycrew.worker_groups._start import GroupSpec
from raycrew.worker_groups.errors import WorkerGroupError

logger = logging.getLogger(__name__)


class Ending(Closing):
    """Ends, and tells what it could not end."""

    _spec: GroupSpec
    _shape: GroupShape
    _life: Lifecycle
    _crew: Crew
    _unwatch: Callable[[], object]
    _ended: Ended | None = None
    _orderly: bool = False

    @abstractmethod
    def _deliver(self, dispatch: Dispatch, timeout: float | None) -> MultiWorkerFuture[Any, Any]:
        """Send each call of a dispatch to workers that can take it."""

    @abstractmethod
    def _check_connection(self) -> None:
        """Raise a `WorkerGroupClosedError` if the workers can't be reached any more."""

    @property
    def unended(self) -> dict[int, str]:
        """Ranks that the shutdown could not see end, and why; empty before it, and if all is well."""
        return {} if self._ended is None else dict(self._ended.left)

    def shutdown(self, cleanup_method: str | None = None, timeout: float = 30.0, force: bool = False) -> bool:
        """End all workers with all that they have started, and give their bundles back.

        A worker has ended when its process and those that it has started are gone from its node; a bundle is
        given back only then, or when its node is gone. A restart in another thread is given up. Of several
        threads one does it, and the others wait for that. Once it is over, this gives the same answer again;
        where something was left, it tries once more.

        Args:
            cleanup_method: Method to call on each worker first, without arguments.
            timeout: Seconds for it, and for the workers to end by themselves; then they are killed.
            force: Kill them at once, without the clean-up.

        Returns:
            Whether clean-up succeeded, every worker ended by itself (or was to be killed, with `force`), and
            nothing is left; `unended` names the ranks of which that isn't known.

        Raises:
            UnknownMethodError: The class has no such clean-up method; the workers have ended all the same.
            TypeError: It needs arguments; the workers have ended all the same. Or `timeout` is no number, and
                nothing is done.
            ValueError: The same of `timeout` that is `nan`.
        """
        if (deadline := deadline_after(timeout)) is None:
            raise TypeError("shutdown() ends workers after some seconds of timeout=, not after None")
        return self._life.close(
            lambda: self._shut_down(cleanup_method, deadline, force), lambda: bool(self.unended)
        )

    def _shut_down(self, cleanup_method: str | None, deadline: float, force: bool) -> bool:
        again, clean = self._ended is not None, False
        try:
            if not force:
                look_before_end(left(deadline))
            if not again:
                clean = cleanup_method is None or force or self._clean_up(cleanup_method, left(deadline))
        finally:
            self._ended = end_and_release(self._crew, left(deadline) or 0.0, force)
            self._unwatch()  # only now: where somebody interrupts this, it is done once nobody has the group
            if not again:
                self._orderly = clean and (force or not self._ended.late)
        return self._orderly and not self._ended.left

    def _note_end(self, ended: Ended) -> None:
        """Take in what became of workers whose start failed."""
        self._ended = ended
        log_left(self._spec.name, ended)

    def _clean_up(self, method: str, timeout: float | None) -> bool:
        dispatch = dispatch_single(self._shape, method, (), {})
        try:
            self._check_connection()
            self._deliver(dispatch, timeout).get_results()
        except (WorkerGroupError, RayError) as error:
            logger.warning("%s: %s before the shutdown: %s", self._spec.name, method, error)
            return False
        return True
