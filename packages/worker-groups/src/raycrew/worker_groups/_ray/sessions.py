"""The connection of this process to Ray, and what only goes over one that is still the same."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from raycrew.cluster_core import ClusterClosedError, Session
from raycrew.worker_groups.errors import WorkerGroupClosedError, WorkerGroupError


def current_session() -> Session:
    """The session of this process.

    Raises:
        WorkerGroupError: It is not connected to Ray, which would connect by itself to whatever it finds.
    """
    session = Session.current()
    if session is None:
        raise WorkerGroupError("this process is not connected to Ray; call init_ray() first")
    return session


@contextmanager
def while_connected(check: Callable[[], object]) -> Iterator[Session]:
    """The session of this process, which alone is used in here; once it has ended, raises as `check` does."""
    check()
    try:
        session = current_session()
        with session.while_connected():
            yield session
    except Exception:
        check()
        raise


def connection() -> str | None:
    """Which connection to Ray this process has: another one after every `ray.init`, None without one."""
    session = Session.current()
    return None if session is None else session.id


def check_session(session: Session | None, whose: str) -> None:
    """Make sure that this process still has a session; otherwise Ray would connect by itself to another.

    Raises:
        WorkerGroupClosedError: It has not, or there never was one.
    """
    if session is None:
        raise WorkerGroupClosedError(f"{whose}: there was no connection to Ray when this was made")
    try:
        session.check()
    except ClusterClosedError as error:
        raise WorkerGroupClosedError(f"{whose}: {error}") from None


def is_behind_proxy() -> bool:
    """Whether this process is connected through a `ray://` proxy."""
    client: Any = ray.util.client.ray
    return bool(client.is_connected())
