"""Work on many bytes by this thread and a few helpers, part by part."""

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

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
    helpers = 0 if size < _PARALLEL_BYTES else _helpers()

    def work_on_what_is_left() -> None:
        for part in waiting:
            work(part)

    if not helpers:
        work_on_what_is_left()
        return
    # On a busy machine helpers come late or never: whoever has a processor takes the next section.
    pool = ThreadPoolExecutor(helpers, thread_name_prefix="copy")
    helping: list[Future[None]] = []
    try:
        with contextlib.suppress(RuntimeError):  # There may be no more threads to be had.
            helping.extend(pool.submit(work_on_what_is_left) for _ in range(helpers))
        work_on_what_is_left()
    finally:
        list(waiting)  # After an interrupt nobody begins another one.
        helping = [helper for helper in helping if not helper.cancel()]
        wait(helping)
        pool.shutdown()
    for helper in helping:
        helper.result()


def _helpers() -> int:
    """How many there are processors for beside this thread's own."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_THREADS, mine) - 1
