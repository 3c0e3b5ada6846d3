"""Waiting for objects, also beside the main thread, where `ray.shutdown()` may come meanwhile.

Ray frees what a thread that waits within it uses: then the process ends, or reads what is not there. So such
a thread is within Ray only for looks, and `ray.shutdown()` waits for these.
"""

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from raycrew.tensor_transport._ray.compat import is_client, no_shutdown, ray_module
from raycrew.tensor_transport._ray.session import Session

_LOOK_S, _LOOKS_APART_S, _SLICE_S = 0.0005, 0.02, 0.1


def not_ready(refs: Sequence[Any], timeout_s: float | None, session: Session) -> list[Any]:
    """Those objects that are not on this node after a while; a lost one counts as being here.

    Raises:
        TransportClosedError: The session over which they are waited for has ended.
    """
    with session.while_connected():
        if is_beside():
            return _look(refs, timeout_s, session)
        return _pending(refs, timeout_s)


def is_beside() -> bool:
    """Whether `ray.shutdown()` may well come from another thread while this one waits."""
    return threading.current_thread() is not threading.main_thread() and not is_client()


def await_ready(refs: Any, timeout_s: float | None, session: Session) -> float | None:
    """Wait until what is to be got is here; the seconds that are left.

    Raises:
        TransportClosedError: The session over which it is waited for has ended.
    """
    began, kind = time.monotonic(), ray_module().ObjectRef
    wanted = dict.fromkeys(refs if isinstance(refs, Sequence) else [refs])
    if only := [ref for ref in wanted if isinstance(ref, kind)]:
        _look(only, timeout_s, session)
    return None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - began))


def await_told(refs: Sequence[Any], timeout_s: float, session: Session) -> tuple[float, list[Future[Any]]]:
    """Wait until Ray says that objects are here, or that one can't be, outside of Ray.

    Ray reads the objects to say so, which is for small ones.

    Returns:
        The seconds left, and what Ray said of each object, or will say.

    Raises:
        TransportClosedError: The session over which it is waited for has ended.
    """
    deadline = time.monotonic() + timeout_s
    with no_shutdown():
        session.check()
        told = [ref.future() for ref in refs]
    while (left_s := deadline - time.monotonic()) > 0:
        done, pending = wait(told, min(left_s, _SLICE_S), FIRST_EXCEPTION)
        if not pending or any(one.exception() for one in done):
            break
        session.check()
    return max(0.0, left_s), told


def _look(refs: Sequence[Any], timeout_s: float | None, session: Session) -> list[Any]:
    """Look now and then, as long as no shutdown is under way; the pause is a twentieth of the time."""
    began, left = time.monotonic(), list(refs)
    while True:
        with no_shutdown():
            session.check()
            left = _pending(left, 0)
        waited = time.monotonic() - began
        within_s = math.inf if timeout_s is None else timeout_s - waited
        if not left or within_s <= 0:
            return left
        time.sleep(min(max(waited / 20, _LOOK_S), _LOOKS_APART_S, within_s))


def _pending(refs: Sequence[Any], timeout_s: float | None) -> list[Any]:
    pending: list[Any] = ray_module().wait(list(refs), num_returns=len(refs), timeout=timeout_s)[1]
    return pending
