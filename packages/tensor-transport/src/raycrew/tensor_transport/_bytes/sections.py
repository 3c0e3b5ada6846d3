"""Work on many bytes by this thread and a few helpers, part by part."""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from raycrew.tensor_transport._bytes.kept_threads import processors, run_beside

_THREADS = 4
_PARALLEL_BYTES = 8 << 20  # From here on work is worth the start of threads.
_T = TypeVar("_T")


def in_sections(size: int, section: int, work: Callable[[int, int], object]) -> None:
    """Call `work(start, stop)` for each section of `size` bytes, as `share_out` does."""
    share_out(range(0, size, section), size, lambda start: work(start, min(start + section, size)))


def share_out(
    parts: Sequence[_T], size: int, work: Callable[[_T], object], *, leaves_half: bool = False
) -> None:
    """Call `work` for each part of what is `size` bytes in all, in any order; raise what one of them raised.

    It returns, and raises, only when none of them is under way any more. Half of the processors may be left
    to other processes.
    """
    shared = Shared(parts, size, work, leaves_half=leaves_half)
    try:
        shared.begin()
        shared.finish()
    except BaseException:  # an interrupt, say
        shared.stop()
        raise


class Shared(Generic[_T]):
    """Work that helpers begin with while this thread does something else: `share_out` that waits later.

    What has begun must be finished, or stopped.
    """

    def __init__(
        self, parts: Sequence[_T], size: int, work: Callable[[_T], object], *, leaves_half: bool = False
    ) -> None:
        self._waiting, self._work = iter(parts), work
        threads = min(_THREADS, len(parts), len(processors()) // (2 if leaves_half else 1))
        self._helpers = 0 if size < _PARALLEL_BYTES else max(0, threads - 1)
        self._helping: list[Future[None]] = []

    def begin(self) -> None:
        """Have helpers begin."""
        # On a busy machine helpers come late: whoever has a processor takes the next section.
        with contextlib.suppress(RuntimeError):  # There may be no more threads to be had.
            self._helping.extend(run_beside(self._work_on_what_is_left) for _ in range(self._helpers))

    def finish(self) -> None:
        """Do what is left of it, and raise what a part raised; none is under way any more."""
        try:
            self._work_on_what_is_left()
        finally:
            self.stop()
        for helper in self._helping:
            helper.result()

    def stop(self) -> None:
        """Have nobody begin another part, and wait for those that are under way."""
        list(self._waiting)
        self._helping = [helper for helper in self._helping if not helper.cancel()]
        wait(self._helping)

    def _work_on_what_is_left(self) -> None:
        for part in self._waiting:
            self._work(part)
