"""What ends with a `with` block, or by awaiting."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from raycrew.worker_groups._calls.answers import uninterrupted


class Closing(ABC):
    """Whoever owns a group can end it; see the methods."""

    @abstractmethod
    def shutdown(self, cleanup_method: str | None = None, timeout: float = 30.0, force: bool = False) -> bool:
        """End all workers and give their bundles back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(force=error is not None)

    async def ashutdown(
        self, cleanup_method: str | None = None, timeout: float = 30.0, force: bool = False
    ) -> bool:
        """The same as `shutdown`, without blocking the event loop; being cancelled does not stop it."""
        return await uninterrupted(lambda: self.shutdown(cleanup_method, timeout, force))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.ashutdown(force=error is not None)
