"""Fingerprints of files and folders that decide what is in an environment."""

import hashlib
import os
import re
import stat
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator

from raycrew.venv_manager._spec.local.checkout import counted_by_git
from raycrew.venv_manager._spec.local.credentials import without_credentials
from raycrew.venv_manager.errors import SpecError

_LITTER = frozenset({
    "__pycache__", "node_modules", ".git", ".hg", ".svn", ".tox", ".nox", ".eggs", ".idea", ".vscode",
    ".DS_Store", ".coverage", ".hypothesis", ".ipynb_checkpoints", ".mypy_cache", ".pytest_cache",
    ".ruff_cache",
})  # fmt: skip
_OUTPUT = frozenset({"build", "dist", "site"})  # only beside the project file: below, packages are named so
# What lock files say of places, in the formats of uv and of PEP 751.
_PLACES = frozenset({"registry", "directory", "editable", "virtual", "index", "upload-time"})
_OF_FILES = frozenset({"url", "path"})
_ARCHIVES = (".whl", ".zip", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
_SIZES, _MOMENTS = re.compile(r"size = \d+"), re.compile(r"upload-time = [\d:TZ.+-]+")
_REVISION = re.compile(r"(?m)^revision = \d+\n")
# The clocks of file systems tick: every 4 to 10 ms on most, every 2 s on some. What changes twice within one
# tick has the times of the first change.
_TICK_NS = 2_000_000_000
_RUNS = "x"
_hashes: dict[tuple[Callable[[str], str], str], tuple[tuple[int, ...], str]] = {}


def file_hash(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file; read again only after its size, a time or its inode changed, or if that just did."""
    return _hashed(str(path), _of_bytes)


def content_hash(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file, marked where its owner can run it, as git counts a file."""
    return _hashed(str(path), _of_file)


def runnable(mode: int) -> str:
    """A mark for the mode of what its owner can run; nothing for others."""
    return _RUNS if mode & stat.S_IXUSR else ""


def text_hash(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a text file without the user names and passwords of its URLs."""
    return _hashed(str(path), _of_text)


def lock_hash(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a lock file, but for the places that it names: of files only their names count."""
    return _hashed(str(path), _of_lock)


def archive_hash(path: str | os.PathLike[str]) -> str:
    """SHA-256 over the names, sizes and CRC-32 sums of what a wheel holds; of any other file, over its bytes.

    A wheel lists those at its end, so that a wheelhouse of many gigabytes need not be read through.
    """
    return _hashed(str(path), _of_members)


def _hashed(name: str, read: Callable[[str], str]) -> str:
    try:
        found = os.stat(name)  # noqa: PTH116 - in the hot path of every `ensure`
        # The time of the last change of the inode is the one that no program sets back.
        mark = (found.st_ctime_ns, found.st_mtime_ns, found.st_size, found.st_ino)
        known = _hashes.get((read, name))
        if known is None or known[0] != mark:
            known = (mark, read(name))
            if time.time_ns() - found.st_ctime_ns > _TICK_NS:
                _hashes[read, name] = known
    except OSError as error:
        raise SpecError(f"{name} cannot be read: {error}") from error
    return known[1]


def _of_bytes(name: str) -> str:
    with open(name, "rb") as file:  # noqa: PTH123
        return hashlib.file_digest(file, "sha256").hexdigest()


def _of_file(name: str) -> str:
    return _of_bytes(name) + runnable(os.stat(name).st_mode)  # noqa: PTH116 - as above


def _of_text(name: str) -> str:
    with open(name, encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123
        text = without_credentials(file.read())
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _of_lock(name: str) -> str:
    with open(name, encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123
        text = without_places(file.read())
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def without_places(lock: str) -> str:
    """The text of a lock file without URLs, paths, and when and in how many bytes files were published.

    It is not parsed, which takes long in Python: what is written in an unusual way counts as it is written.
    """
    parts = lock.split('"')
    for i in range(1, len(parts), 2):
        before = parts[i - 1]
        if before.endswith(" = "):
            label = before[:-3].rpartition(" ")[2].strip()
            if label in _PLACES:
                parts[i] = ""
            elif label in _OF_FILES:
                parts[i] = _file_name(parts[i])
            elif label == "git":
                parts[i] = parts[i].rpartition("#")[2]
    return _MOMENTS.sub("", _SIZES.sub("", _REVISION.sub("", '"'.join(parts), count=1)))


def _file_name(place: str) -> str:
    name = re.split("[?#]", place, maxsplit=1)[0].rpartition("/")[2]
    return name if name.endswith(_ARCHIVES) else ""


def _of_members(name: str) -> str:
    try:
        with zipfile.ZipFile(name) as archive:
            members = sorted(
                (m.filename, m.file_size, m.CRC, runnable(m.external_attr >> 16)) for m in archive.infolist()
            )
    except zipfile.BadZipFile:
        return _of_bytes(name)
    return hashlib.sha256(repr(members).encode()).hexdigest()


def ignored_fingerprint(folder: str, names: Iterable[str]) -> str:
    """SHA-256 over files, and what lies in folders, that git ignores below a folder."""
    paths = (f"{folder}/{name.rstrip('/')}" for name in sorted(names))
    return _of_files(folder, (file for path in paths for file in _below(path)))


def holds_files(path: str) -> bool:
    """Whether there is a file, or a folder that holds one."""
    return next(_below(path), None) is not None


def files_below(path: str) -> list[str]:
    """A file, or all files of a folder without caches."""
    return list(_below(path))


def _below(path: str) -> Iterator[str]:
    if os.path.isdir(path):  # noqa: PTH112
        yield from _walk(path, {os.path.realpath(path)})
    elif os.path.isfile(path):  # noqa: PTH113
        yield path


def folder_fingerprint(folder: str | os.PathLike[str]) -> str:
    """SHA-256 over names and contents of a source folder, without caches and build output."""
    return _of_files(str(folder), _walk(str(folder)))


def source_fingerprint(folder: str | os.PathLike[str]) -> str:
    """SHA-256 over names and contents of what git counts of a folder; where it counts none, of all."""
    listed = counted_by_git(str(folder))
    return (
        folder_fingerprint(folder) if listed is None else _of_files(str(folder), _given(str(folder), listed))
    )


def _of_files(root: str, paths: Iterator[str]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path[len(root) :]}\0{content_hash(path)}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _given(root: str, listed: list[tuple[str, bool]]) -> Iterator[str]:
    """The files among what git lists: links and submodules are walked, what a build left untracked is not."""
    for name, tracked in listed:
        path = f"{root}/{name}"
        if not tracked and is_litter(root, name):
            continue
        if os.path.isdir(path):  # noqa: PTH112 - a link, a submodule
            yield from _walk(path, {os.path.realpath(root)})
        elif os.path.isfile(path):  # noqa: PTH113 - one that was deleted is listed until that is committed
            yield path


def is_litter(root: str, name: str) -> bool:
    """Whether something below a source is a cache, a virtual environment or what builds leave."""
    parts = name.rstrip("/").split("/")
    if any(part in _LITTER or part.endswith((".egg-info", ".pyc")) for part in parts):
        return True
    if name.endswith("/") and os.path.exists(f"{root}/{name}pyvenv.cfg"):  # noqa: PTH110
        return True
    return parts[0] in _OUTPUT and not os.path.exists(f"{root}/{parts[0]}/__init__.py")  # noqa: PTH110


def _walk(folder: str, seen: set[str] | None = None) -> Iterator[str]:
    """All files below, through links to folders, too; each target of such links once."""
    skipped = _OUTPUT if seen is None else frozenset()
    seen = {os.path.realpath(folder)} if seen is None else seen
    try:
        entries = sorted(os.scandir(folder), key=lambda e: e.name)
    except OSError as error:
        raise SpecError(f"{folder} cannot be read: {error}") from error
    for entry in entries:
        if entry.name in _LITTER or entry.name.endswith((".egg-info", ".pyc")):
            continue
        if entry.is_dir():
            if entry.name in skipped and not _holds(entry, "__init__.py"):
                continue
            if entry.is_symlink():
                target = os.path.realpath(entry.path)
                if target in seen:
                    continue
                seen.add(target)
            if not _holds(entry, "pyvenv.cfg"):
                yield from _walk(entry.path, seen)
        elif entry.is_file():
            yield entry.path


def _holds(entry: os.DirEntry[str], name: str) -> bool:
    return os.path.exists(os.path.join(entry.path, name))  # noqa: PTH110, PTH118
