"""Work on many bytes by this thread and a few helpers, part by part."""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from raycrew.tensor_transport._bytes.kept_threads import processors, run_beside

_THREADS = 4
_PARALLEL_BYTES = 8 << 20  # From here on work is worth the start of threads.
_T = TypeVar("_T")


def in_sections(size: int, section: int, work: Callable[[int, int], object]) -> None:
    """Call `work(start, stop)` for each section of `size` bytes, as `share_out` does."""
    share_out(range(0, size, section), size, lambda start: work(start, min(start + section, size)))


def share_out(parts: Sequence[_T], size: int, work: Callable[[_T], object]) -> None:
    """Call `work` for each part of what is `size` bytes in all, in any order; raise what one of them raised.

    It returns, and raises, only when none of them is under way any more.
    """
    waiting = iter(parts)
    helpers = 0 if size < _PARALLEL_BYTES else min(_THREADS, len(parts), len(processors())) - 1

    def work_on_what_is_left() -> None:
        for part in waiting:
            work(part)

    # On a busy machine helpers come late: whoever has a processor takes the next section.
    helping: list[Future[None]] = []
    try:
        with contextlib.suppress(RuntimeError):  # There may be no more threads to be had.
            helping.extend(run_beside(work_on_what_is_left) for _ in range(helpers))
        work_on_what_is_left()
    finally:
        list(waiting)  # After an interrupt nobody begins another one.
        helping = [helper for helper in helping if not helper.cancel()]
        wait(helping)
    for helper in helping:
        helper.result()
