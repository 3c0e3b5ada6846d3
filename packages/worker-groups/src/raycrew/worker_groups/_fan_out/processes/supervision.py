"""One batch in one slot, from sending it to knowing how it ended."""

import logging
import select
import signal
import time
from dataclasses import dataclass
from typing import Literal

from raycrew.worker_groups._fan_out.processes.journal import (
    INITIALIZING,
    LOADING,
    Head,
    Stamp,
    StrayMessageError,
    count_finished,
    finished,
)
from raycrew.worker_groups._fan_out.processes.process import ANSWER, DONE
from raycrew.worker_groups._fan_out.processes.slots import FORK_TIMEOUT_S, Slot

logger = logging.getLogger(__name__)

ACCEPT_TIMEOUT_S = 60.0
"""A process that does not take in a byte of its batch for so long is deaf."""
LONGEST_WAIT_S = 3600.0
"""The kernel takes no more than a few weeks at a time."""
LOAD_TIMEOUT_S = 300.0
INITIALIZER_TIMEOUT_S = 1800.0

Stop = Literal["done", "timeout", "crash", "unloadable", "uninitialized", "lost", "cancelled"]


@dataclass(frozen=True, slots=True)
class BatchReport:
    """How a batch ended.

    Attributes:
        stop: Why it ended: `done`; the item after the finished ones ran past its time (`timeout`) or ended
            its process (`crash`); the function could not be loaded (`unloadable`) or its initializer failed
            (`uninitialized`); the process was lost through no fault of an item (`lost`); or the call was
            given up (`cancelled`).
        journal: The finished items, for `_journal.finished`.
        detail: Exit status or traceback, in words.
        stamp: Whose the journal's entries are.
    """

    stop: Stop
    journal: bytes
    detail: str = ""
    stamp: Stamp | None = None


def supervise(slot: Slot, stamp: Stamp, message: bytes, items: int, timeout_s: float | None) -> BatchReport:
    """Run a batch in an idle slot.

    Args:
        slot: Where. Whatever the report is but `done`, its process is of no use afterwards.
        stamp: Whose its answer and its journal must be.
        message: The batch.
        items: How many items are in it.
        timeout_s: Seconds for each.
    """
    answer, overtime = b"", None
    if _send(slot, message):
        answer, overtime = _wait(slot, stamp, timeout_s)
    try:
        if answer:
            return _answered(slot, stamp, answer, items)
        if not slot.dead.wait(FORK_TIMEOUT_S):
            logger.warning("process %d was ended, but its fork server does not say so", slot.pid)
        return _post_mortem(slot, stamp, overtime)
    except StrayMessageError as error:
        slot.end()
        slot.dead.wait(FORK_TIMEOUT_S)
        logger.warning("a process that runs items was ended: %s", error)
        return BatchReport("lost", b"", "was ended for a message that was not its own")


def _send(slot: Slot, message: bytes) -> bool:
    """Whether the process took the whole message in; one that is deaf is ended."""
    poll = select.poll()
    poll.register(slot.connection, select.POLLOUT)
    poll.register(slot.pidfd, select.POLLIN)
    rest = memoryview(message)
    while rest:
        ready = {fd for fd, _ in poll.poll(1000 * ACCEPT_TIMEOUT_S)}
        if not ready:
            slot.end()
        if slot.connection.fileno() not in ready or slot.pidfd in ready:
            return False
        try:
            rest = rest[slot.connection.send(rest) :]
        except BlockingIOError:
            continue
        except OSError:  # it has closed its end, and can't be told anything
            slot.end()
            return False
    return True


def _wait(slot: Slot, stamp: Stamp, timeout_s: float | None) -> tuple[bytes, int | None]:
    """The slot's answer (empty: it is ended), and the position at which it was ended for its time."""
    poll = select.poll()
    poll.register(slot.connection, select.POLLIN)
    poll.register(slot.pidfd, select.POLLIN)
    accept_by = time.monotonic() + ACCEPT_TIMEOUT_S
    while True:
        head, now = _own_head(slot, stamp), time.monotonic()
        until = accept_by if head is None else _deadline(head, timeout_s)
        if until is not None and until <= now:
            slot.end()
            return b"", None if head is None else head.position
        # Nobody says when an item begins, so look again when one that begins now may be late.
        wait_s = LONGEST_WAIT_S if timeout_s is None else min(timeout_s, LONGEST_WAIT_S)
        wait_s = wait_s if until is None else min(until - now, wait_s)
        ready = {fd for fd, _ in poll.poll(1000 * wait_s + 1)}
        if slot.connection.fileno() in ready:
            if answer := _receive(slot):
                return answer, None
            poll.unregister(slot.connection)  # deaf: from now on only its deadline and its end can be seen
        elif slot.pidfd in ready:
            return b"", None


def _own_head(slot: Slot, stamp: Stamp) -> Head | None:
    """What the batch is at, None before its process has accepted it."""
    head = slot.journal.head()
    return head if head is not None and head.stamp == stamp else None


def _receive(slot: Slot) -> bytes:
    try:
        return slot.connection.recv(ANSWER.size)
    except OSError:
        return b""


def _deadline(head: Head, timeout_s: float | None) -> float | None:
    """Until when what runs may run. Loading has more time than an item, and is charged to none."""
    if timeout_s is None:
        return None
    more = {INITIALIZING: INITIALIZER_TIMEOUT_S, LOADING: LOAD_TIMEOUT_S}
    return head.started + max(timeout_s, more.get(head.position, 0.0))


def _answered(slot: Slot, stamp: Stamp, answer: bytes, items: int) -> BatchReport:
    if len(answer) != ANSWER.size:
        raise StrayMessageError(f"an answer of {len(answer)} bytes to {stamp}")
    kind, *who = ANSWER.unpack(answer)
    if Stamp(*who) != stamp:
        raise StrayMessageError(f"an answer of {Stamp(*who)} to {stamp}")
    data = slot.journal.read()
    if kind == DONE:
        if count_finished(data, stamp) != items:
            raise StrayMessageError(f"an answer of {stamp} before its {items} items had ended")
        return BatchReport("done", data, stamp=stamp)
    head, failure = _own_head(slot, stamp), next(finished(data, stamp, LOADING), None)
    if head is None or failure is None:
        raise StrayMessageError(f"an answer of {stamp} without its reason")
    slot.end()  # half an import or half an initializer is nothing to build on
    return BatchReport(_loading(head.position), b"", failure.payload.decode(), stamp)


def _post_mortem(slot: Slot, stamp: Stamp, overtime: int | None) -> BatchReport:
    """Whose fault a process's death was: the item that had started and not finished, or nobody's."""
    head = _own_head(slot, stamp)
    how = "was lost" if slot.exit_status is None else _in_words(slot.exit_status)
    if head is None:
        return BatchReport("lost", b"", f"{how} before it took in its batch")
    position = head.position
    if position < 0:
        if slot.exit_status is None:
            return BatchReport("lost", b"", how)
        doing = "ran the initializer" if position == INITIALIZING else "loaded the function"
        late = " (it took too long)" if overtime == position else ""
        return BatchReport(_loading(position), b"", f"the process {how} while it {doing}{late}", stamp)
    data = slot.journal.read()
    if position == count_finished(data, stamp):
        if overtime is not None:
            return BatchReport("timeout" if overtime == position else "lost", data, how, stamp)
        if slot.exit_status is not None:
            return BatchReport("crash", data, how, stamp)
    return BatchReport("lost", data, how, stamp)


def _loading(position: int) -> Stop:
    return "uninitialized" if position == INITIALIZING else "unloadable"


def _in_words(status: int) -> str:
    if status >= 0:
        return f"exited with code {status}"
    named = {one.value: one.name for one in signal.Signals}  # not all real-time ones
    return f"was killed by {named.get(-status, f'signal {-status}')}"
