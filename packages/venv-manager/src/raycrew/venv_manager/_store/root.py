"""The folder that a store lies in."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from raycrew.venv_manager.errors import SpecError

# Folders of what is kept beside environments, for as long as it is asked for.
CHOICES, SOURCES = "choices", "sources"

_MODE, _BY_GROUP = 0o755, 0o020


def default_root(environ: Mapping[str, str] = os.environ) -> Path:
    """`RAYCREW_VENV_DIR` (or `NEMO_RL_VENV_DIR`), else a folder in the user's cache.

    Raises:
        SpecError: Nothing says where that is.
    """
    named = environ.get("RAYCREW_VENV_DIR") or environ.get("NEMO_RL_VENV_DIR")
    if named:
        return whole_path(named)
    cache = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "~", ".cache")
    return whole_path(Path(cache, "raycrew", "venvs"))


def whole_path(path: str | Path) -> Path:
    """An absolute path, with `~` as the user's home.

    Raises:
        SpecError: Nobody knows that home.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise SpecError(
            f"there is no store {path}: {error} (no HOME, no such user); RAYCREW_VENV_DIR names a folder"
        ) from error


def used(file: Path) -> None:
    """Say that a record was asked for; in a store that cannot be written to, nothing is removed either."""
    with contextlib.suppress(OSError):
        os.utime(file)


def make_folder(root: Path, name: str = "") -> Path:
    """A store's folder, or one in it, which others may write only where they may write the store.

    Raises:
        OSError: It cannot be made.
    """
    for folder in reversed([root, *root.parents]):
        if not folder.exists():
            folder.mkdir(_MODE, exist_ok=True)
    if name:
        (root / name).mkdir(_MODE | root.stat().st_mode & _BY_GROUP, exist_ok=True)
    return root / name
