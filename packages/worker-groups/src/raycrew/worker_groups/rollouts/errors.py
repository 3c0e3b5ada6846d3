"""The errors of rollouts, a tree under `RolloutError`.

What can not be meant (a deadline of no seconds, say) is a `ValueError` or `TypeError` where it is said.
"""

from typing import Any

from raycrew.worker_groups.errors import WorkerGroupError


class RolloutError(WorkerGroupError):
    """Base of every error of rollouts."""


class RolloutFailedError(RolloutError):
    """A rollout failed as often as it was tried.

    Attributes:
        id: Of its prompt.
        sample: Which of the prompt's rollouts it was.
        kind: "raised" (the coroutine did), "late" (it ran past its deadline) or "lost" (its process died).
        attempts: How often it was tried.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details
        self.id: str = details.get("id", "")
        self.sample: int = details.get("sample", 0)
        self.kind: str = details.get("kind", "")
        self.attempts: int = details.get("attempts", 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (str(self.args[0]), self.details), self._state


class PromptError(RolloutError):
    """The stream of prompts raised, or gave one that can't be used; its cause is what was raised."""


class RolloutFileError(RolloutError):
    """A collection's folder or file can't be used: of another collection, damaged, full, or in use."""


def _rebuild(message: str, details: dict[str, Any]) -> RolloutFailedError:
    return RolloutFailedError(message, **details)
