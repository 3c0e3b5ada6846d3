"""The folder of a session: where it may be, and the way to its logs."""

import contextlib
import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

from raycrew.cluster_core.errors import ClusterError

logger = logging.getLogger(__name__)

_SOCKET_SUFFIX = "/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
_SOCKET_PATH_LIMIT = 107
_TEMPORARY = "/tmp"
_LONGEST = _SOCKET_PATH_LIMIT - len(_SOCKET_SUFFIX)


def folder_of_sessions(environ: Mapping[str, str]) -> str | None:
    """Where sessions lie if nobody says so: below a folder of this user's alone, as Ray opens its own to all.

    None leaves the choice to Ray: `RAY_TMPDIR` is set, or the paths of sockets would become too long.

    Raises:
        ValueError: Ray would hang with a folder that the environment names.
        ClusterError: The place of the user's own folder is taken by somebody else, or it can't be made.
    """
    folder = temporary_folder(environ)
    for name in ("RAY_TMPDIR", "TMPDIR"):
        if environ.get(name):
            check_session_folder(str(folder / "ray"), name, environ)
            break
    if environ.get("RAY_TMPDIR"):
        return None
    own = folder / f"raycrew-{os.getuid()}"
    if len(os.fsencode(own / "ray")) > _LONGEST:
        logger.warning("%s is too long for a session: its folder, %s/ray, is open to all", own, own.parent)
        return None
    try:
        _make_private(own)
    except OSError as error:
        raise ClusterError(
            f"{own}, where sessions would lie, can't be made: {error.strerror}. Pass another temp_dir"
        ) from error
    return str(own / "ray")


def temporary_folder(environ: Mapping[str, str]) -> Path:
    """The folder below which Ray has its own by default, whatever `TEMP` and `TMP` say."""
    return Path(environ.get("RAY_TMPDIR") or environ.get("TMPDIR") or _TEMPORARY)


def _make_private(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ClusterError(
            f"{folder}, where sessions would lie, is not this user's own: pass another temp_dir"
        )
    for parent in folder.resolve().parents:
        if _is_anybodys(parent.stat().st_mode):
            logger.warning("%s: others may replace it, as %s is open to all", folder, parent)
    folder.chmod(0o700)


def _is_anybodys(mode: int) -> bool:
    """Whether everybody may remove from a folder what others have put there."""
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


def check_session_folder(path: str, source: str, environ: Mapping[str, str]) -> None:
    """Refuse folders for sessions with which Ray would hang instead of failing: its workers die at once.

    Raises:
        ValueError: The folder is one.
    """
    if len(os.fsencode(path)) > _LONGEST:
        raise ValueError(
            f"{source} {path!r} has {len(os.fsencode(path))} bytes; sockets below it allow {_LONGEST} at most"
        )
    check_folder(path, source)
    if not Path(path).is_absolute():
        raise ValueError(f"{source} {path!r} is not absolute, and Ray's processes run in other folders")
    active = environ.get("VIRTUAL_ENV")
    if active and Path(path).resolve().is_relative_to(Path(active).resolve()):
        raise ValueError(
            f"{source} {path!r} lies inside the active virtual environment {active}, where Ray refuses to "
            "keep a session; pass another temp_dir"
        )


def check_folder(path: str | os.PathLike[str], source: str) -> None:
    """Refuse what can be no folder, before a cluster is started for it.

    Raises:
        ValueError: It, or a part of its path, is something else.
    """
    whole = Path(path).absolute()
    there = next(part for part in (whole, *whole.parents) if part.exists())
    if not there.is_dir():
        raise ValueError(f"{source} is {os.fspath(path)!r}, and {there} is no folder: name one, or a new one")


def link_logs(log_dir: str | os.PathLike[str] | None, session_dir: str | None) -> None:
    """Have a folder of the user's lead to the logs of a session.

    Raises:
        ClusterError: Something else is in the way.
    """
    if log_dir is None or session_dir is None:
        return
    folder = Path(log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    link, fresh = folder / "ray", folder / f".ray-{uuid4().hex}"
    if link.exists() and not link.is_symlink():
        raise ClusterError(f"{link} is in the way of the link to Ray's logs in {session_dir}/logs")
    fresh.symlink_to(Path(session_dir) / "logs", target_is_directory=True)
    try:
        fresh.replace(link)  # Others may do the same at this moment.
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
