"""The one gate to Ray's control service: every question has a deadline, where Ray itself would wait for ever.

A question is asked in a daemon thread. One that is given up may still be answered later, so whoever asks for
something to be made says how to undo that.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from raycrew.tensor_transport._ray.session import Session, current_session
from raycrew.tensor_transport.errors import TransportTimeoutError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ANSWER_S = 10.0

_MOST = 32  # Questions that may wait at the same time; those that were given up count.

_room = threading.BoundedSemaphore(_MOST)


def ask(
    question: Callable[[], T],
    *,
    timeout_s: float | None = None,
    undo: Callable[[T], object] | None = None,
    session: Session | None = None,
) -> T:
    """What the control service answers.

    Args:
        question: Asks, and returns the answer.
        timeout_s: Seconds until it is given up, ten unless named.
        undo: Called with an answer that comes too late.
        session: Over which it is asked, that of this process unless named.

    Raises:
        TransportClosedError: This process is not connected to Ray, or the connection ended meanwhile.
        TransportTimeoutError: No answer in time.
    """
    session = session or current_session()
    session.check()
    timeout_s = _ANSWER_S if timeout_s is None else timeout_s
    if not _room.acquire(timeout=timeout_s):
        raise TransportTimeoutError(
            f"{_MOST} questions wait for Ray's control service; this one was not asked"
        )
    answer: Future[T] = Future()
    thread = threading.Thread(
        target=_ask, args=(question, answer, undo, session), name="raycrew-answer", daemon=True
    )
    try:
        thread.start()
    except BaseException:
        _room.release()
        raise
    with session.while_connected():
        return _wait(answer, timeout_s, undo)


def _wait(answer: Future[T], timeout_s: float, undo: Callable[[T], object] | None) -> T:
    try:
        return answer.result(timeout_s)
    except BaseException as error:
        if answer.cancel():
            if isinstance(error, TimeoutError):
                raise TransportTimeoutError(
                    f"Ray's control service did not answer within {timeout_s:g} s"
                ) from None
        elif isinstance(error, TimeoutError):  # It came at the last moment, or is itself a timeout.
            return answer.result()
        elif undo is not None and answer.exception() is None:  # Interrupted between answer and return.
            undo(answer.result())
        raise


def _ask(
    question: Callable[[], Any],
    answer: Future[Any],
    undo: Callable[[Any], object] | None,
    session: Session,
) -> None:
    try:
        try:
            with session.while_connected():
                found = question()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asked
            _tell(answer.set_exception, error)
        else:
            if not _tell(answer.set_result, found) and undo is not None:
                _undo(undo, found, session)
    finally:
        _room.release()


def _tell(settle: Callable[[Any], None], outcome: Any) -> bool:
    """Hand an outcome over; False where nobody waits for it any more."""
    try:
        settle(outcome)
    except InvalidStateError:
        logger.debug("Ray's control service answered a question that was given up")
        return False
    return True


def _undo(undo: Callable[[Any], object], found: Any, session: Session) -> None:
    if Session.current() != session:
        return  # What it made ended with the connection.
    try:
        with session.while_connected():
            undo(found)
    except Exception:
        logger.exception("what Ray made after it was given up could not be taken back: %r", found)
