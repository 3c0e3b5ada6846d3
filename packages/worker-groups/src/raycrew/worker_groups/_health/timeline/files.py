"""Files of a timeline: refused before anything is recorded, and written whole in the end."""

import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def files_to_write(**paths: str | os.PathLike[str] | None) -> list[Path | None]:
    """Where files will be written in the end, by the name of the argument that says so.

    Raises:
        OSError: A file can't be written there.
        ValueError: Something else than a file is there, or two of them are the same.
    """
    names: dict[Path, str] = {}
    found: list[Path | None] = []
    for name, path in paths.items():
        found.append(None if path is None else _writable(name, path))
        if (file := found[-1]) is not None and (other := names.setdefault(file, name)) != name:
            raise ValueError(
                f"{other} and {name} are both {file}, and one would replace the other: name two files"
            )
    return found


def write(path: Path, text: str) -> None:
    """Write a file whole, or not at all; one that is replaced keeps its permissions."""
    with _beside(path) as new:
        new.write_text(text, encoding="utf-8")
        if path.exists():
            new.chmod(stat.S_IMODE(path.stat().st_mode))
        new.replace(path)


def _writable(name: str, given: str | os.PathLike[str]) -> Path:
    """Where a link leads to, else the link would be replaced."""
    path = Path(given).resolve()
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{name} can't be written to {path}: there is no folder {path.parent}")
    if path.exists() and not path.is_file():  # a device would be replaced by the file
        kind = _KINDS.get(stat.S_IFMT(path.stat().st_mode), "something else")
        raise ValueError(
            f"{name} is {os.fspath(given)!r}, which is {kind}: name a file, or a new one in a folder"
        )
    with _beside(path):
        return path


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A new file beside another one while it is made; what goes wrong with it is told of the other."""
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")  # nobody else has put anything there
    try:
        try:
            os.close(os.open(new, os.O_CREAT | os.O_EXCL, 0o600 if path.exists() else 0o666))
            yield new
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"it can't be written: {error.strerror}", str(path)) from error
