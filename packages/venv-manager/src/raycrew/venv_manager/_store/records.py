"""What a store keeps beside environments for as long as it is asked for: choices, and wheels of sources."""

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from raycrew.venv_manager._store.root import CHOICES, SOURCES
from raycrew.venv_manager._store.shelf import Shelf

_DAY_S = 86400.0


def unused_since(store: Shelf, days: float) -> Iterator[Path]:
    """Records that nobody asked for in so many days."""
    before = time.time() - days * _DAY_S
    for name in (CHOICES, SOURCES):
        for file in sorted((store.root / name).glob("*.json")):
            with suppress(FileNotFoundError):  # another one has removed it
                if not file.is_symlink() and file.stat().st_mtime < before:
                    yield file


def size_of(file: Path) -> int:
    """Bytes of a record, with what belongs to it."""
    beside = file.with_suffix("")
    return sum(path.stat().st_size for path in (file, *beside.glob("*")))


def remove(file: Path) -> None:
    """Take a record away, with what belongs to it."""
    file.unlink(missing_ok=True)
    shutil.rmtree(file.with_suffix(""), ignore_errors=True)
