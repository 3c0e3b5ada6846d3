"""What a `with` block closes at its end."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """A context manager that is itself what it gives, and is closed where its block ends, however it ends."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Give up what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
