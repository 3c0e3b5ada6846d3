"""The one gate to Ray's control service: every question has a deadline, where Ray itself would wait for ever.

A question is asked in a daemon thread. One that is given up may still be answered later, so whoever asks for
something to be made says how to undo that.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import nullcontext, suppress
from typing import Any, TypeVar

from ray.exceptions import GetTimeoutError

from raycrew.cluster_core._ray.compat import is_forked
from raycrew.cluster_core._ray.forks import PerProcess
from raycrew.cluster_core._ray.parents import why_not
from raycrew.cluster_core._ray.session import Session
from raycrew.cluster_core.errors import ClusterError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ANSWER_S = 10.0
_MOST = 32  # Questions that may wait at the same time; those that were given up count.

_room = PerProcess(lambda: threading.BoundedSemaphore(_MOST))
_here = threading.local()


def ask(
    question: Callable[[], T],
    *,
    timeout_s: float | None = None,
    undo: Callable[[T], object] | None = None,
    connected: bool = True,
) -> T:
    """What the control service answers. Within a question another one is a part of it, under its deadline.

    Args:
        question: Asks, and returns the answer.
        timeout_s: Seconds until it is given up.
        undo: Called with an answer that comes too late.
        connected: Whether it is asked over this process's connection, and over no other one.

    Raises:
        ClusterError: This process is not connected to Ray.
        ClusterClosedError: The connection ended before there was an answer.
        GetTimeoutError: No answer in time.
    """
    session = check_connected() if connected else None
    if getattr(_here, "asks", False):
        return question()
    timeout_s = _ANSWER_S if timeout_s is None else timeout_s
    room = _room.here
    answer: Future[T] = Future()
    leave = _once(room.release)
    thread = threading.Thread(
        target=_ask, args=(leave, question, answer, undo, session), name="raycrew-answer", daemon=True
    )
    if not room.acquire(timeout=timeout_s):
        raise GetTimeoutError(f"{_MOST} questions wait for Ray's control service; this one was not asked")
    try:
        _begin(thread, answer, undo)
        with session.while_connected() if session is not None else nullcontext():
            return _wait(answer, timeout_s, undo)
    finally:
        if thread.ident is None:  # it has not begun, as far as is known
            leave()


def answer_s() -> float:
    """Seconds that an answer may take."""
    return _ANSWER_S


def check_connected() -> Session:
    """Refuse to go on without Ray, which would start one of its own accord.

    Raises:
        ClusterClosedError: A question is being asked over a connection that has ended.
        ClusterError: This process is not connected to Ray.
    """
    session = Session.current()
    if session is None:
        check_not_forked()
        raise ClusterError("this process is not connected to Ray; call init_ray() first")
    asked: Session | None = getattr(_here, "session", None)
    if asked is not None:
        asked.check()
    return session


def check_not_forked() -> None:
    """Make sure that this process can connect to Ray.

    Raises:
        ClusterError: It was forked from one that is connected.
    """
    if is_forked():
        raise ClusterError(why_not())


def _once(give_back: Callable[[], object]) -> Callable[[], None]:
    """Gives back the first time only that it is called, by whichever thread."""
    due = [give_back]

    def give_back_once() -> None:
        with suppress(IndexError):
            due.pop()()

    return give_back_once


def _begin(thread: threading.Thread, answer: Future[Any], undo: Callable[[Any], object] | None) -> None:
    try:
        _start(thread)
    except BaseException:
        _give_up(answer, undo)
        raise


def _start(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError:
        if threading.main_thread().is_alive():
            raise
        thread.run()  # from Python 3.12 on no thread begins at the interpreter's end: asked in this one


def _wait(answer: Future[T], timeout_s: float, undo: Callable[[T], object] | None) -> T:
    try:
        return answer.result(timeout_s)
    except TimeoutError:
        if not answer.cancel():  # It came at the last moment, or is itself a timeout.
            return answer.result()
        raise GetTimeoutError(f"Ray's control service did not answer within {timeout_s:g} s") from None
    except BaseException:
        _give_up(answer, undo)
        raise


def _give_up(answer: Future[Any], undo: Callable[[Any], object] | None) -> None:
    """Want no answer any more; one that is there already is undone, later ones are where they come."""
    if not answer.cancel() and undo is not None and answer.exception() is None:
        undo(answer.result())


def _ask(
    leave: Callable[[], None],
    question: Callable[[], Any],
    answer: Future[Any],
    undo: Callable[[Any], object] | None,
    session: Session | None,
) -> None:
    _here.asks, _here.session = True, session
    try:
        try:
            with session.while_connected() if session is not None else nullcontext():
                found = question()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asked
            _tell(answer.set_exception, error)
        else:
            if not _tell(answer.set_result, found) and undo is not None:
                _undo(undo, found, session)
    finally:
        leave()


def _tell(settle: Callable[[Any], None], outcome: Any) -> bool:
    """Hand an outcome over; False where nobody waits for it any more."""
    try:
        settle(outcome)
    except InvalidStateError:
        logger.debug("Ray's control service answered a question that was given up")
        return False
    return True


def _undo(undo: Callable[[Any], object], found: Any, session: Session | None) -> None:
    if session is not None and Session.current() != session:
        return  # What it made ended with the connection.
    try:
        with session.while_connected() if session is not None else nullcontext():
            undo(found)
    except Exception:
        logger.exception("what Ray made after it was given up could not be taken back: %r", found)
