"""What may have a balancer: a group, and each handle of it."""

from abc import ABC, abstractmethod

from raycrew.worker_groups.balancing._balancer import LoadBalancer


class Balanced(ABC):
    """Has a balancer where its group was made with one."""

    _balancer: LoadBalancer | None

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the group."""

    @abstractmethod
    def _open(self) -> object:
        """Raise a `WorkerGroupClosedError` if it has ended."""

    @property
    def balancer(self) -> LoadBalancer:
        """Spreads calls (`call`) and streams of items (`map`, `as_completed`) over the workers.

        It knows the loads of what went through it alone: those of a group and of its handles are several.

        Raises:
            ValueError: The group was made without `enable_load_balancing=True`.
        """
        if self._balancer is None:
            raise ValueError(f"worker group {self.name!r} was made without enable_load_balancing=True")
        return self._balancer
