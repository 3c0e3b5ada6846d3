"""Signals that reach this process, one after another, beside what a pipe brings: no work in handlers."""

import os
import select
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

_SIZE = 4096
NAMED = (
    *(signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGTSTP, signal.SIGCONT, signal.SIGCHLD),
)
ENDS = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP})  # Which ask for an end.


class Signals:
    """Signals that came since this was entered, in the main thread.

    What is ignored, as under nohup, stays so.
    """

    def __init__(self) -> None:
        self._read, self._write = -1, -1
        self._wakeup_before = -1
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in NAMED:
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, _note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._read)
        os.close(self._write)
        for number, handler in reversed(self._before.items()):  # SIGINT last, which raises from then on.
            signal.signal(number, handler)

    def wait(self, timeout_s: float | None, beside: Sequence[int] = ()) -> tuple[list[int], bool]:
        """Wait for a signal, for a descriptor that can be read, or for a time.

        Returns:
            The signals, as they came, and whether a descriptor can be read.
        """
        ready, _, _ = select.select([self._read, *beside], [], [], timeout_s)
        numbers = list(os.read(self._read, _SIZE)) if self._read in ready else []
        return numbers, any(one in ready for one in beside)


@contextmanager
def held_back() -> Iterator[Callable[[], None]]:
    """What comes meanwhile comes afterwards, and to this process alone.

    A process that is forked in here calls what this gives: it gets none of what its parent gets and passes
    on, and tells the parent of none, through the pipe that they share.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NAMED)

    def be_itself() -> None:
        signal.set_wakeup_fd(-1)
        for number in NAMED:
            if signal.getsignal(number) is _note:
                signal.signal(number, signal.SIG_IGN)  # which forgets what has come
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        yield be_itself
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _note(number: int, frame: FrameType | None) -> None:
    """The number comes through the pipe; a handler of Python's is what makes it do so."""
