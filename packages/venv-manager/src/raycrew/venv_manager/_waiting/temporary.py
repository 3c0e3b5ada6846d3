"""Temporary folders that go away, also those of processes that were killed."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from raycrew.venv_manager._waiting.flocks import leave, take, try_lock
from raycrew.venv_manager.errors import StoreError, VenvError, of_store


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A temporary folder; those of the same prefix that killed processes left go away, too.

    Raises:
        DiskFullError: No space is left for what is written there.
        StoreError: There is no such folder, or it cannot be written to.
    """
    try:
        top = Path(tempfile.gettempdir())
    except OSError as error:
        raise StoreError(
            f"there is no folder for temporary files: {error}; is the disk full? TMPDIR names another folder"
        ) from error
    for left in top.glob(f"{prefix}*"):
        _clear_if_left(left)
    folder, descriptor = None, None
    try:
        folder, descriptor = _locked_folder(prefix)
        yield folder
    except VenvError:  # some of them are timeouts, and so OSErrors
        raise
    except OSError as error:
        raise of_store(error, folder or top) from error
    finally:
        if folder is not None and descriptor is not None:
            shutil.rmtree(folder, ignore_errors=True)
            leave(descriptor)


def _locked_folder(prefix: str) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        with contextlib.suppress(FileNotFoundError):  # cleared by another one before it was locked
            descriptor = take(folder, os.O_RDONLY)
            try:
                mine = try_lock(descriptor, fcntl.LOCK_EX) and folder.exists()
            except OSError:  # such a folder cannot be locked here, nor cleared by anybody
                mine = True
            if mine:
                return folder, descriptor
            leave(descriptor)


def _clear_if_left(folder: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = take(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_uid == os.geteuid() and try_lock(descriptor, fcntl.LOCK_EX):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            leave(descriptor)
