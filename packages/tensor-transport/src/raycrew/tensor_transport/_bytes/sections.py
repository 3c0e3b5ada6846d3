"""Work on many bytes by this thread and a few helpers, section by section."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

_THREADS = 4
_PARALLEL_BYTES = 16 << 20  # From here on work is worth the start of threads.


def in_sections(size: int, section: int, work: Callable[[int, int], object]) -> None:
    """Call `work(start, stop)` for each section of `size` bytes, in any order; raise what one of them raised.

    It returns, and raises, only when none of them is under way any more.
    """
    starts = iter(range(0, size, section))
    helpers = 0 if size < _PARALLEL_BYTES else min(_THREADS, os.cpu_count() or 1) - 1

    def work_on_what_is_left() -> None:
        for start in starts:
            work(start, min(start + section, size))

    if not helpers:
        work_on_what_is_left()
        return
    # On a busy machine helpers come late or never: whoever has a processor takes the next section.
    pool = ThreadPoolExecutor(helpers, thread_name_prefix="copy")
    helping = [pool.submit(work_on_what_is_left) for _ in range(helpers)]
    try:
        work_on_what_is_left()
    finally:
        list(starts)  # After an interrupt nobody begins another one.
        helping = [helper for helper in helping if not helper.cancel()]
        wait(helping)
        pool.shutdown()
    for helper in helping:
        helper.result()
