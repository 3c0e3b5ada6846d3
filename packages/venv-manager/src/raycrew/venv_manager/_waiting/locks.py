"""Who builds, who uses, whose scratch is whose: locks that the kernel gives back when their holder dies."""

import contextlib
import fcntl
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from raycrew.venv_manager._waiting.flocks import leave, no_fork, take, taken, try_lock
from raycrew.venv_manager._waiting.forks import PerProcess
from raycrew.venv_manager._waiting.interrupt import stop_if_interrupted
from raycrew.venv_manager._waiting.progress import Report, changes, silent
from raycrew.venv_manager.errors import DiskFullError, StoreError, StoreTimeoutError, VenvError, of_store

logger = logging.getLogger(__name__)

POLL_S = 0.05
HEAR_S = 0.2  # between two looks at what the builder says
LOOK_S = 1.0  # between two looks at its lock; its release is heard at once, but on some file systems late
_held: dict[str, int] = {}
_sleepers: dict[str, threading.Event] = {}
_guard = PerProcess(threading.Lock)
os.register_at_fork(after_in_child=_sleepers.clear)  # There is no thread that sleeps.


class KeyLocks:
    """The locks of one environment.

    Args:
        folder: Where lock files lie.
        key: The environment's digest.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        self._lock = folder / f"{key}.lock"
        self._busy = folder / f"{key}.busy"
        self._used = folder / f"{key}.used"
        self._progress = folder / f"{key}.progress"

    @contextlib.contextmanager
    def building(
        self, timeout_s: float, report: Report = silent, published: Callable[[], bool] = lambda: False
    ) -> Iterator[int | None]:
        """Be the one that builds or removes, unless another one is done first.

        The yielded descriptor is locked, too, and meant to be handed to all that a build starts: while
        a uv that outlived its killed parent still writes, or an interpreter is still probed, it stays locked.
        It is None once `published` says that there is nothing left to do.

        Raises:
            StoreTimeoutError: Another process was not done in time; at once with a deadline of 0.
            StoreError: The store's files cannot be locked.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with _opened(self._lock) as lock:
                if _locked(self._lock, lock):
                    with self._alone(deadline, report) as busy:
                        yield busy
                    return
            if published():
                yield None
                return
            self._await_release(deadline, report)

    @contextlib.contextmanager
    def _alone(self, deadline: float, report: Report) -> Iterator[int]:
        with _opened(self._busy) as busy:
            while not _locked(self._busy, busy):
                self._say(deadline, report, "what a killed build started is still running")
                time.sleep(POLL_S)
            _name_holder(busy, f"process {os.getpid()} on {platform.node()} since {_now()}")
            try:
                yield busy
            finally:
                _name_holder(busy, "")

    def _await_release(self, deadline: float, report: Report) -> None:
        """Return when the lock is released, or when it is time to look at it again in any case."""
        look = time.monotonic() + LOOK_S
        while time.monotonic() < look:
            said = self.progress() or "another process builds it"
            self._say(deadline, report, f"{said} ({holder})" if (holder := self.holder()) else said)
            if _release_of(str(self._lock)).wait(min(HEAR_S, max(0.0, deadline - time.monotonic()))):
                return

    def _say(self, deadline: float, report: Report, why: str) -> None:
        stop_if_interrupted()
        if time.monotonic() >= deadline:
            raise StoreTimeoutError(f"{self._lock} is held: {why}")
        report(f"waiting: {why}")

    def holder(self) -> str:
        """Who builds or removes: its process, its machine, since when; nothing where nobody does."""
        try:
            return self._busy.read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    def tell(self, text: str | None) -> None:
        """Say what the build is doing, to those who wait; None when it is over."""
        with contextlib.suppress(OSError):
            if text is None:
                self._progress.unlink(missing_ok=True)
            else:
                self._progress.write_text(text, encoding="utf-8")

    @contextlib.contextmanager
    def telling(self, report: Report) -> Iterator[Report]:
        """What tells a caller, and those who wait for it, what is new; in the end that it is over."""

        def tell(text: str) -> None:
            report(text)
            self.tell(text)

        try:
            yield changes(tell)
        finally:
            self.tell(None)

    def progress(self) -> str:
        """What the build said last."""
        try:
            return self._progress.read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    def use(self) -> bool:
        """Say that this process uses the environment while it lives; False while that is being replaced.

        In a store whose file system has no locks there is nothing to say it with; nothing is built or removed
        there either.
        """
        name = str(self._used)
        if name in _held:
            return True
        with _guard.here:
            if name not in _held:
                if not _begin_use(name):
                    return False
                with contextlib.suppress(OSError):
                    os.utime(name)
            return True

    def release(self) -> None:
        """This process uses the environment no longer."""
        with _guard.here, no_fork.here:
            descriptor = _held.pop(str(self._used), None)
            if descriptor is not None:
                os.close(descriptor)

    def last_used(self) -> float:
        """When a process last began to use it, in seconds since the epoch; 0 if that is not known."""
        try:
            return self._used.stat().st_mtime
        except OSError:
            return 0.0

    @contextlib.contextmanager
    def unused(self) -> Iterator[bool]:
        """Whether no process uses it; while it is so, none can begin to. To look is no use.

        Raises:
            StoreError: The store's files cannot be locked.
        """
        is_known = self.last_used() > 0
        with _opened(self._used) as used:
            free = _locked(self._used, used)
            if free and not is_known:
                with contextlib.suppress(OSError):
                    os.utime(used, (0, 0))
            yield free


def _begin_use(name: str) -> bool:
    """Lock the file of an environment's users together with them, as long as this process lives."""
    with no_fork.here:
        try:
            descriptor = _opened_to_use(name)
        except OSError:
            return True
        try:
            mine = try_lock(descriptor, fcntl.LOCK_SH)
        except OSError as error:
            logger.debug("%s cannot be locked: %s", name, error)
            os.close(descriptor)
            return True
        if mine:
            _held[name] = descriptor
        else:
            os.close(descriptor)
        return mine


def _opened_to_use(name: str) -> int:
    """In a store that cannot be written to, who uses it can still be told to those who may write there."""
    try:
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC)


def _use_too() -> None:
    """What is forked uses what its parent uses, each as long as it lives: until then they share the lock."""
    for name, shared in list(_held.items()):
        del _held[name]
        _begin_use(name)
        os.close(shared)


os.register_at_fork(after_in_child=_use_too)


@contextlib.contextmanager
def slot(folder: Path, count: int, timeout_s: float, report: Report = silent) -> Iterator[None]:
    """One of the places for builds that this machine has.

    Raises:
        StoreTimeoutError: None became free in time.
    """
    deadline = time.monotonic() + timeout_s
    places = [folder / f"slot-{platform.node()}-{n}.lock" for n in range(count)]
    while True:
        for place in places:
            with _opened(place) as lock:
                if _locked(place, lock):
                    yield
                    return
        if time.monotonic() >= deadline:
            raise StoreTimeoutError(
                f"{count} other environments are being built on this machine, none is done yet"
            )
        stop_if_interrupted()
        report("waiting: other environments are being built on this machine")
        time.sleep(POLL_S)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        descriptor = take(path)
    except OSError as error:
        raise _unlockable(path, error) from error
    try:
        yield descriptor
    finally:
        leave(descriptor)


def _locked(path: Path, descriptor: int) -> bool:
    try:
        return try_lock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        raise _unlockable(path, error) from error


def _unlockable(path: Path, error: OSError) -> VenvError:
    if isinstance(full := of_store(error, path), DiskFullError):
        return full
    return StoreError(
        f"{path} cannot be locked: {error}; a store needs a file system with file locks (NFS: mounted with "
        "them), and lock files that all who build in it may write; RAYCREW_VENV_DIR names another folder"
    )


def _release_of(name: str) -> threading.Event:
    """Set as soon as a lock is released: a thread sleeps in the kernel, one for all who wait or gave up."""
    with _guard.here:
        released = _sleepers.get(name)
        if released is None:
            released = _sleepers[name] = threading.Event()
            threading.Thread(target=_sleep_until_released, args=(name, released), daemon=True).start()
        return released


def _sleep_until_released(name: str, released: threading.Event) -> None:
    try:
        with taken(name) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
    except OSError:
        time.sleep(POLL_S)
    with _guard.here:
        _sleepers.pop(name, None)
    released.set()


def _name_holder(descriptor: int, text: str) -> None:
    """For those who wait; on a full disk they do without."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, text.encode())


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
