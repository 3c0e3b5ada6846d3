"""What happens to processes at a given time, in a thread beside what is disturbed."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from chaos.leaks import RUN, is_of_run

SHORT_S = 0.05


class MissedError(Exception):
    """There was nobody to whom something could happen."""


@dataclass
class Strike:
    """Something that happens once, a while after it was armed.

    Args:
        delay_s: How long after.
        act: What happens; it raises a `MissedError` if there is nobody to whom it can.

    Attributes:
        began: When it happened, on the monotonic clock; 0 before.
        done: Whether it is over.
        missed: Why it happened to nobody; empty if it did not miss.
    """

    delay_s: float
    act: Callable[[], object]
    began: float = 0.0
    done: bool = False
    missed: str = ""
    _errors: list[BaseException] = field(default_factory=list)

    def run(self) -> None:
        """Wait, and act."""
        time.sleep(self.delay_s)
        self.began = time.monotonic()
        try:
            self.act()
        except MissedError as error:
            self.missed = str(error)
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that has armed it
            self._errors.append(error)
        finally:
            self.done = True

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


Send = Callable[[signal.Signals], None]


@contextlib.contextmanager
def _process(pid: int) -> Iterator[Send]:
    """Sends signals to one process of this run, and to none that gets its id later.

    Raises:
        MissedError: There is none, or it has ended since.
    """
    ended = MissedError(f"process {pid} had ended before")
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        raise ended from None

    def send(number: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(process, number)
        except ProcessLookupError:
            raise ended from None

    try:
        if not is_of_run(pid, os.environ[RUN]):  # somebody else has its id by now
            raise ended
        yield send
    finally:
        os.close(process)


def kill(pid: int) -> None:
    """End a process that was started by this run; it is a `MissedError` that it has ended already."""
    with _process(pid) as send:
        send(signal.SIGKILL)


def stop(pid: int, lasts_s: float) -> None:
    """Stop a process for some time; it is a `MissedError` that it has ended already."""
    with _process(pid) as send:
        _stop(send, lasts_s)


def slow_down(pid: int, lasts_s: float) -> None:
    """Let a process run for about a third of some time only; a `MissedError` if it has ended already."""
    until = time.monotonic() + lasts_s
    with _process(pid) as send:
        _stop(send, SHORT_S)
        with contextlib.suppress(MissedError):
            while time.monotonic() < until:
                time.sleep(SHORT_S / 2)
                _stop(send, SHORT_S)


def _stop(send: Send, lasts_s: float) -> None:
    send(signal.SIGSTOP)
    try:
        time.sleep(lasts_s)
    finally:
        with contextlib.suppress(MissedError):  # somebody has killed it meanwhile
            send(signal.SIGCONT)


def wait_for(what: str, find: Callable[[], int | None], timeout_s: float = 60.0) -> int:
    """What a function finds, as soon as it finds something.

    Raises:
        MissedError: It found nothing in time.
    """
    deadline = time.monotonic() + timeout_s
    while (found := find()) is None:
        if time.monotonic() >= deadline:
            raise MissedError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.01)
    return found
