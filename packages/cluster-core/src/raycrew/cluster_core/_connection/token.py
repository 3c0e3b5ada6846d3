"""The token that a cluster asks for: kept from other users' eyes, and passed on by its file's name."""

import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from raycrew.cluster_core.errors import ClusterError

logger = logging.getLogger(__name__)

_VALUE, _FILE, _MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"


def default_token_file() -> Path:
    """Where Ray looks for a token that no variable names.

    Raises:
        ClusterError: This user has no home directory.
    """
    try:
        return Path.home() / ".ray" / "auth_token"
    except RuntimeError as error:
        raise ClusterError(
            f"user {os.getuid()} has no home directory, where Ray keeps its token: set HOME, or name the "
            f"token's file by {_FILE}"
        ) from error


def authentication(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that say whether there is a token, and where."""
    return {name: environ[name] for name in (_MODE, _FILE, _VALUE) if environ.get(name)}


def protect_token(environ: Mapping[str, str], token_file: Path | None = None) -> None:
    """Make sure that the token which a new cluster will use is in a file that only this user can read.

    Ray would write one that everybody can read. Nothing is done where a variable brings the token, or where
    authentication is off.

    Raises:
        ClusterError: It can't be written.
    """
    if environ.get(_VALUE) or environ.get(_FILE) or environ.get(_MODE, "token").lower() != "token":
        return
    path = token_file or default_token_file()
    try:
        _protect(path)
    except OSError as error:
        raise ClusterError(
            f"the token of the new cluster can't be kept in {path}: {error}. Set HOME to a folder of yours, "
            f"or name the token's file by {_FILE}"
        ) from error


def _protect(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if path.stat().st_mode & 0o077 and path.stat().st_uid == os.getuid():
            logger.warning("%s could be read by other users; its mode is set to 0600", path)
            path.chmod(0o600)
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))


def read_token(environ: Mapping[str, str], token_file: Path | None = None) -> str | None:
    """The token that Ray will present, or None where it presents none."""
    if environ.get(_MODE, "").lower() != "token":
        return None
    if environ.get(_VALUE):
        return environ[_VALUE].strip()
    path = Path(environ.get(_FILE) or token_file or default_token_file())
    return path.read_text().strip() if path.is_file() else None


def child_authentication(environ: Mapping[str, str], token_file: Path | None = None) -> dict[str, str]:
    """Variables by which a child process presents the same token as this one.

    Args:
        environ: The environment as Ray saw it.
        token_file: Ray's default file, for tests.
    """
    passed = authentication(environ)
    if passed.get(_MODE, "").lower() == "token" and not passed.keys() & {_VALUE, _FILE}:
        path = token_file or default_token_file()
        if path.exists():
            passed[_FILE] = str(path)
    return passed
