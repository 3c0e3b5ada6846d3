"""What ranks answer to a call, and hearing early of one that does not."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

from raycrew.tensor_transport._ray.compat import ray_module
from raycrew.tensor_transport._ray.session import current_session
from raycrew.tensor_transport._ray.waiting import await_told, is_beside
from raycrew.tensor_transport.errors import TransportClosedError
from raycrew.tensor_transport.protocols import PeerResults, SupervisedResults

_TOLD_S = 1.0
"""So long Ray is to tell of answers; whoever looks for later ones hears of them a fiftieth later at most."""


def answered(answer: PeerResults, timeout_s: float | None, on_failure: Callable[[Exception], object]) -> Any:
    """The results of a call; of a failure somebody is told before anything is done about it.

    A group may replace a lost worker before it raises, and only once the others have ended what they are in.
    That may be to wait for the very rank that is lost, until somebody tells them.

    Args:
        answer: What the call gave.
        timeout_s: Deadline for the results.
        on_failure: Told at once where the group says so early.

    Raises:
        Exception: What `get_results` does.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    _await_told(answer, _TOLD_S if timeout_s is None else min(_TOLD_S, timeout_s))
    if isinstance(answer, SupervisedResults):
        failure = answer.exception(timeout=timeout_s)
        if failure is not None:
            on_failure(failure)
    left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
    return answer.get_results(timeout=left_s)


def _await_told(answer: PeerResults, timeout_s: float) -> None:
    """Wait for what calls of Ray answer, where whoever waits beside the main thread would have to look."""
    if not (isinstance(answer, list) and answer and is_beside()):
        return
    kind = ray_module().ObjectRef
    if all(isinstance(ref, kind) for ref in answer):
        with contextlib.suppress(TransportClosedError):  # The answer itself says so.
            await_told(answer, timeout_s, current_session())
