"""What pip is configured with, which uv does not read."""

import configparser
import os
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from raycrew.venv_manager.errors import SpecError, fault_of


def pip_settings(environ: Mapping[str, str], prefix: str = sys.prefix) -> dict[str, str]:
    """What pip is configured with: its files from the widest to the narrowest, then its variables.

    uv does not read these. Only the sections `global` and `install` count, as for `pip install`.

    Raises:
        SpecError: A file is there and cannot be read: an index that it names would be passed over.
    """
    found: dict[str, str] = {}
    for path in _pip_files(environ, prefix):
        if (stat := _looked_at(path)) is not None:
            found |= _file(path, (stat.st_ctime_ns, stat.st_mtime_ns, stat.st_size, stat.st_ino))
    for name, value in environ.items():
        if name.startswith("PIP_") and value:
            found[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    return found


def _looked_at(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> SpecError:
    return SpecError(
        f"pip's configuration {path} cannot be read: {fault_of(error)}; an index that it names "
        "would be passed over: mend the file or its access, or do "
        "without pip's configuration (PIP_CONFIG_FILE=/dev/null)"
    )


@lru_cache(maxsize=16)
def _file(path: Path, _mark: tuple[int, ...]) -> dict[str, str]:
    """What one file says; read again only after it has changed."""
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text(encoding="utf-8"), str(path))
    except (configparser.Error, UnicodeDecodeError, OSError) as error:
        raise _unreadable(path, error) from None
    found: dict[str, str] = {}
    for section in ("global", "install"):
        if parser.has_section(section):
            found |= {key.replace("_", "-"): value for key, value in parser.items(section)}
    return found


def _pip_files(environ: Mapping[str, str], prefix: str) -> Iterable[Path]:
    named = environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return
    for folder in reversed((environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)):
        yield Path(folder, "pip", "pip.conf")
    yield Path("/etc/pip.conf")
    if home := environ.get("HOME"):
        yield Path(home, ".pip", "pip.conf")
        yield Path(environ.get("XDG_CONFIG_HOME") or Path(home, ".config"), "pip", "pip.conf")
    yield Path(prefix, "pip.conf")
    if named:
        yield Path(named)
