"""When calls have ended: told to a coroutine, to a function, or of whichever future is first."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from threading import Thread
from typing import Any

from raycrew.worker_groups._calls.answers.waiting import left

logger = logging.getLogger(__name__)

_SLICE_S = 1.0


async def first_failure(calls: Sequence[Any], deadline: float | None, go_on: Callable[[], object]) -> bool:
    """Wait until one of some calls has failed, all are done, or the deadline is over; whether one has failed.

    Args:
        calls: Of which each is a `concurrent.futures.Future`.
        deadline: Of the monotonic clock, or None.
        go_on: Called now and then; waiting ends with what it raises.
    """
    loop, failed, ended = asyncio.get_running_loop(), [], count(1)
    enough: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not enough.done():
            enough.set_result(None)

    def note(call: Any) -> None:  # in a thread of Ray's
        if call.cancelled() or call.exception() is not None:
            failed.append(call)
        if next(ended) == len(calls) or failed:
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(settle)

    if not calls:
        return False
    for call in calls:
        call.add_done_callback(note)
    while not enough.done() and left(deadline) != 0.0:
        await asyncio.wait((enough,), timeout=left(deadline, _SLICE_S))
        go_on()
    return bool(failed)


def when_done(calls: Sequence[Any], then: Callable[[], object], name: str) -> None:
    """Call a function in a thread of its own once all of some calls have ended.

    Args:
        calls: Of which each is a `concurrent.futures.Future`.
        then: The function.
        name: What it is called in the log, if it raises.
    """
    ended = count(1)

    def note(_: object) -> None:  # in a thread of Ray's, which must not wait
        if next(ended) >= len(calls):
            Thread(target=_run, args=(then, name), name="raycrew-callback", daemon=True).start()

    for call in calls:
        call.add_done_callback(note)
    if not calls:
        note(None)


def _run(then: Callable[[], object], name: str) -> None:
    try:
        then()
    except Exception:
        logger.exception("%s failed", name)
