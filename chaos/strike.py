"""What happens to processes at a given time, in a thread beside what is disturbed."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

SHORT_S = 0.05


@dataclass
class Strike:
    """Something that happens once, a while after it was armed.

    Args:
        delay_s: How long after.
        act: What happens; it is given a function that waits for seconds, less once the block is over.

    Attributes:
        began: When it happened, on the monotonic clock; 0 before.
    """

    delay_s: float
    act: Callable[[], object]
    began: float = 0.0
    _errors: list[BaseException] = field(default_factory=list)

    def run(self) -> None:
        """Wait, and act."""
        time.sleep(self.delay_s)
        self.began = time.monotonic()
        try:
            self.act()
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that has armed it
            self._errors.append(error)

    def check(self) -> None:
        """Raise what was raised."""
        for error in self._errors:
            raise error


@contextlib.contextmanager
def striking(delay_s: float, act: Callable[[], object]) -> Iterator[Strike]:
    """Let something happen during a block; it has happened when the block is over."""
    strike = Strike(delay_s, act)
    thread = threading.Thread(target=strike.run, name="strike")
    thread.start()
    try:
        yield strike
    finally:
        thread.join()
    strike.check()


def kill(pid: int) -> None:
    """End a process that was started by this run; one that has ended already is left."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def stop(pid: int, lasts_s: float) -> None:
    """Stop a process for some time."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(lasts_s)
        finally:
            os.kill(pid, signal.SIGCONT)


def slow_down(pid: int, lasts_s: float) -> None:
    """Let a process run for about a third of some time only."""
    until = time.monotonic() + lasts_s
    while time.monotonic() < until:
        stop(pid, SHORT_S)
        time.sleep(SHORT_S / 2)


def wait_for(find: Callable[[], int | None], timeout_s: float = 60.0) -> int | None:
    """What a function finds, as soon as it finds something; None when time is up."""
    deadline = time.monotonic() + timeout_s
    while (found := find()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return found
