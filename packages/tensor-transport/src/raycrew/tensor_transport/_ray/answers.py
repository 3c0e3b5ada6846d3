"""What ranks answer to a call, and hearing early of one that does not."""

import time
from collections.abc import Callable
from typing import Any

from raycrew.tensor_transport.protocols import PeerResults, SupervisedResults


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
    if isinstance(answer, SupervisedResults):
        failure = answer.exception(timeout=timeout_s)
        if failure is not None:
            on_failure(failure)
    left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
    return answer.get_results(timeout=left_s)
