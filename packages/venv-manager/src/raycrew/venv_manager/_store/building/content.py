"""What a wheel holds, and which of a source's files came into it, whenever and however it was built."""

import hashlib
import io
import os
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from raycrew.venv_manager._spec import content_hash, files_below, files_of_git, is_litter, runnable
from raycrew.venv_manager._store.building.wheels import said_of_wheel

_READ = (
    ".c", ".cc", ".cpp", ".cxx", ".cu", ".cuh", ".h", ".hh", ".hpp", ".hxx", ".inc", ".inl", ".ipp", ".pxd",
    ".pxi", ".pyx", ".rs", ".f", ".f90", ".s", ".S", ".asm", ".m", ".mm", ".cmake", "CMakeLists.txt",
    "meson.build", "Cargo.toml", "Cargo.lock", "Makefile", "setup.py",
)  # fmt: skip
_RUNS = runnable(0o700)
_COMPILED = (".so", ".pyd", ".dylib")


def members(wheel: bytes) -> dict[str, str]:
    """Paths of what a wheel holds, with sums that tell what can be run; of WHEEL only its tags, no RECORD."""
    found = {}
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        for member in archive.infolist():
            name, content = member.filename, archive.read(member)
            if name.endswith(("/", ".dist-info/RECORD")):
                continue
            if name.endswith(".dist-info/WHEEL"):
                content = "\n".join(said_of_wheel(content.decode())).encode()
            found[name] = _sum(content) + runnable(member.external_attr >> 16)
    return found


def _sum(content: bytes) -> str:
    return f"{len(content)}:{hashlib.sha256(content).hexdigest()}"


def is_compiled(held: Iterable[str]) -> bool:
    """Whether a wheel holds what a compiler made, which comes out differently each time."""
    return any(name.endswith(_COMPILED) for name in held)


def members_of_source(sdist: Path) -> dict[str, str]:
    """Paths, without the folder around them, and SHA-256 sums of what a source archive holds."""
    found = {}
    with tarfile.open(sdist) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None and ".egg-info/" not in member.name:
                found[member.name.partition("/")[2]] = _sum(content.read()) + runnable(member.mode)
    return found


def read_by_compilers(folder: str, left_out: Iterable[str]) -> dict[str, str]:
    """Files of a source, with sums, that a compiler reads and that are not among some: often headers."""
    there = {*left_out}
    names = files_of_git(folder) or [path.removeprefix(f"{folder}/") for path in files_below(folder)]
    found = (name for name in names if name.endswith(_READ) and not is_litter(folder, name))
    return {
        f"beside {name}": content_hash(Path(folder, name))
        for name in found
        if name not in there and Path(folder, name).is_file()
    }


def digest(held: Mapping[str, str]) -> str:
    """SHA-256 over sorted paths and sums."""
    text = "\n".join(f"{name}\0{content}" for name, content in sorted(held.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def shipped(folder: str, names: Iterable[str], held: Mapping[str, str], tops: set[str]) -> set[str]:
    """Which of what git ignores comes, or could come, into a wheel.

    Args:
        folder: The source.
        names: What git ignores there: files, and folders that end in a slash.
        held: What the wheel holds, with sums.
        tops: Folders of the source whose other files came into the wheel: what lies below them may come, too.
    """
    return {
        name
        for name in names
        if (name.endswith("/") and any(name.startswith(f"{top}/") for top in tops))
        or came_of(folder, [name], held)
        or name in held
        or any(name.endswith(f"/{member}") for member in held if "/" in member)
    }


def came_of(folder: str, names: Iterable[str], held: Mapping[str, str]) -> dict[str, str]:
    """Those files among others of a source, with sums, that a wheel holds as they are."""
    sums = {text.removesuffix(_RUNS) for text in held.values()}  # not every backend keeps modes
    sizes = {int(text.partition(":")[0]) for text in sums} - {0}  # empty ones say nothing
    found = {}
    for name in names:
        for file in files_below(f"{folder}/{name.rstrip('/')}"):
            size = os.path.getsize(file)  # noqa: PTH202 - of perhaps very many
            if size in sizes and (text := f"{size}:{content_hash(file)}").removesuffix(_RUNS) in sums:
                found[file.removeprefix(f"{folder}/")] = text
    return found


def tops_of(counted: Iterable[str], held: Iterable[str]) -> set[str]:
    """Folders of a source, its root left out, whose files a wheel holds."""
    there = set(held)
    return {
        path.rpartition("/")[0]
        for path in counted
        if "/" in path and any(_below(path, depth) in there for depth in range(path.count("/") + 1))
    }


def _below(path: str, depth: int) -> str:
    return "/".join(path.split("/")[depth:])
