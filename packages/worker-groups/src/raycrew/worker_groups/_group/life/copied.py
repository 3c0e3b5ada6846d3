"""The life of a copy of a group, which is its owner's to end and to restart."""

from collections.abc import Callable

from raycrew.worker_groups._group.life.states import Lifecycle
from raycrew.worker_groups.errors import WorkerGroupError


class CopiedLifecycle(Lifecycle):
    """The state of a copy of a group in another process, which can be called, but is not its owner."""

    def restart(
        self,
        work: Callable[[], list[int]],  # noqa: ARG002
        name: str = "restart_failed_workers",
        *,
        apart: bool = False,  # noqa: ARG002
        shared: bool = True,  # noqa: ARG002
    ) -> list[int]:
        """Never.

        Raises:
            WorkerGroupError: Always.
        """
        raise self._not_the_owner(name)

    def close(self, work: Callable[[], bool], left: Callable[[], bool] | None = None) -> bool:  # noqa: ARG002
        """Never.

        Raises:
            WorkerGroupError: Always.
        """
        raise self._not_the_owner("shutdown")

    def check_owner(self, what: str) -> None:
        """Always raise.

        Raises:
            WorkerGroupError: Always.
        """
        raise self._not_the_owner(what)

    def _not_the_owner(self, what: str) -> WorkerGroupError:
        return WorkerGroupError(
            f"{what}() of worker group {self._name!r} is for the process that made it: this is a copy, which "
            "came without secrets and claims, and can call the workers and tell where they are"
        )
