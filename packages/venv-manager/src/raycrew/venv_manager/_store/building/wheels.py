"""Wheels: built from a source folder, or put together again from what an installation left of them."""

import base64
import csv
import hashlib
import importlib.metadata
import io
import shutil
import sys
import zipfile
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from raycrew.venv_manager._spec import build_sources, content_hash, extra_requirements, read_toml, runnable
from raycrew.venv_manager._uv import run_uv
from raycrew.venv_manager._waiting import scratch
from raycrew.venv_manager.errors import SpecError, VenvError

# What an installer adds: it says when, whence and by whom, which is nothing of the wheel's.
_LEFT_OUT = frozenset(
    {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json"}
)
_COUNTED = ("Root-Is-Purelib:", "Tag:")  # of WHEEL; the rest names the tool that built it
# Settings of uv that say what is there while a source is built.
_OF_BUILDS = frozenset({
    "build-constraint-dependencies", "extra-build-dependencies", "extra-build-variables",
    "no-build-isolation", "no-build-isolation-package",
})  # fmt: skip
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)
_RUNS = 0o100755  # mode of a file that can be run


def build_wheel(
    source: Path, name: str, environ: Mapping[str, str], python: str | None = None, *,
    timeout_s: float = 3600.0,
) -> tuple[str, bytes]:  # fmt: skip
    """Build a wheel of a source; with the driver's own build backend where that is installed.

    Raises:
        UvError: It does not build.
    """
    with scratch("raycrew-venv-wheel-") as folder:
        path = build_file("--wheel", source, name, folder, environ, python, timeout_s)
        return path.name, path.read_bytes()


def build_file(
    what: str, source: Path, name: str, into: Path, environ: Mapping[str, str], python: str | None,
    timeout_s: float,
) -> Path:  # fmt: skip
    """Build a wheel or a source archive (`--wheel`, `--sdist`) into an empty folder; a wheel is one already.

    Args:
        what: Which of them.
        source: What to build.
        name: Of the package.
        into: The folder.
        environ: The environment of uv.
        python: The interpreter; without one this one.
        timeout_s: Deadline.

    Raises:
        UvError: It does not build.
    """
    if source.suffix == ".whl":
        return Path(shutil.copy(source, into))
    told = _told(environ)
    local = build_sources(source, extra_requirements(told, name))
    apart = python is not None or local or _is_told_of_builds(environ, told)
    as_here = not apart and _backend_is_here(source)
    words: list[str | Path] = ["build", what, *(["--no-build-isolation"] if as_here else [])]
    words += [*_config_settings(name, told), *_fresh(local.values()), "--python", python or sys.executable]
    run_uv([*words, "--out-dir", into, source], environ=environ, timeout_s=timeout_s)
    built = sorted(path for path in into.iterdir() if path.suffix in (".whl", ".gz", ".zip"))
    if len(built) != 1:
        raise VenvError(f"building {source} gave {len(built)} files instead of one")
    return built[0]


def _told(environ: Mapping[str, str]) -> Mapping[str, Any]:
    file = environ.get("UV_CONFIG_FILE")
    return read_toml(Path(file)) if file else {}


def _is_told_of_builds(environ: Mapping[str, str], told: Mapping[str, Any]) -> bool:
    """Whether uv is told what a build needs: not what happens to be installed here."""
    return "UV_BUILD_CONSTRAINT" in environ or not _OF_BUILDS.isdisjoint(told)


def _config_settings(package: str, told: Mapping[str, Any]) -> Iterator[str]:
    """Those for one package, which `uv build` does not take from a file."""
    by_name = {canonicalize_name(n): s for n, s in told.get("config-settings-package", {}).items()}
    for name, given in by_name.get(canonicalize_name(package), {}).items():
        for value in given if isinstance(given, list) else [given]:
            yield f"--config-setting={name}={str(value).lower() if isinstance(value, bool) else value}"


def _fresh(local: Iterable[set[str]]) -> Iterator[str]:
    """What a build must not take from uv's cache: local sources, known there by few of their files."""
    for name in sorted({name for names in local for name in names}):
        yield from ("--refresh-package", name)


def _backend_is_here(source: Path) -> bool:
    file = source / "pyproject.toml"
    build_system = read_toml(file).get("build-system", {}) if file.is_file() else {}
    try:
        needed = [Requirement(text) for text in build_system["requires"]]
        return all(r.specifier.contains(importlib.metadata.version(r.name), prereleases=True) for r in needed)
    except (KeyError, InvalidRequirement, importlib.metadata.PackageNotFoundError):
        return False


def repack(dist: importlib.metadata.Distribution) -> tuple[str, bytes]:
    """The wheel that an installed distribution came from, put together again from its RECORD.

    Raises:
        VenvError: It was not installed from a wheel, or files of it are gone.
    """
    name = canonicalize_name(dist.metadata["Name"]).replace("-", "_")
    said = (line.partition(":") for line in _said_of_wheel(dist))
    tags = [value.strip() for label, _, value in said if label == "Tag"]
    listed = _members(dist)
    if not listed or not tags:
        raise VenvError(f"{name} {dist.version} has no RECORD or WHEEL file: reinstall it from a wheel")
    try:
        files = {text: Path(str(dist.locate_file(text))) for text in listed}
        rows = [(text, file.read_bytes()) for text, file in files.items()]
        runs = {text for text, file in files.items() if runnable(file.stat().st_mode)}
    except OSError as error:
        raise VenvError(f"{name} {dist.version} is damaged, reinstall it: {error}") from error
    (info,) = {text.partition("/")[0] for text in listed if _is_info(PurePosixPath(text))}
    return f"{name}-{dist.version}-{_joined(tags)}.whl", pack(rows, info, runs)


def content_fingerprint(dist: importlib.metadata.Distribution) -> str:
    """What an installed distribution brings: the same of equal wheels, however and whenever installed.

    A file that is gone counts as such; `repack` refuses it by name.
    """
    digest = hashlib.sha256("\n".join(_said_of_wheel(dist)).encode())
    base = str(dist.locate_file(""))
    for text in _members(dist):
        if not text.endswith(".dist-info/WHEEL"):
            digest.update(f"\n{text}\0{_hash_of(f'{base}/{text}')}".encode())
    return digest.hexdigest()


def _hash_of(path: str) -> str:
    try:
        return content_hash(path)
    except SpecError:
        return "gone"


def _said_of_wheel(dist: importlib.metadata.Distribution) -> list[str]:
    return said_of_wheel(dist.read_text("WHEEL") or "")


def said_of_wheel(text: str) -> list[str]:
    """What counts of a WHEEL file: whose it is for, not what built it."""
    lines = text.splitlines()
    return sorted(line.strip() for line in lines if line.startswith(_COUNTED))


def _members(dist: importlib.metadata.Distribution) -> tuple[str, ...]:
    """Paths of what the wheel held, of all that is installed."""
    return _listed(dist.read_text("RECORD") or "")


@lru_cache(maxsize=16)
def _listed(record: str) -> tuple[str, ...]:
    """Parsed once: in the hot path of every `ensure`."""
    rows = csv.reader(record.splitlines())
    return tuple(sorted(row[0] for row in rows if row and _is_member(PurePosixPath(row[0]))))


def _is_member(path: PurePosixPath) -> bool:
    made_by_installer = path.suffix == ".pyc" or (_is_info(path) and path.name in _LEFT_OUT)
    return not (made_by_installer or path.is_absolute() or ".." in path.parts)


def _is_info(path: PurePosixPath) -> bool:
    return len(path.parts) == 2 and path.parts[0].endswith(".dist-info")


def _joined(tags: list[str]) -> str:
    """Several tags of one wheel as its file name has them."""
    parts = [tag.split("-") for tag in tags]
    return "-".join(".".join(dict.fromkeys(p[i] for p in parts)) for i in range(3))


def pack(rows: Iterable[tuple[str, bytes]], info: str, runs: Container[str] = ()) -> bytes:
    """A wheel of (path, content) pairs, some of which can be run, with its RECORD, always the same bytes."""
    buffer = io.BytesIO()
    record = []
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in rows:
            member = zipfile.ZipInfo(path, _ZIP_TIME)
            if path in runs:
                member.external_attr = _RUNS << 16
            archive.writestr(member, content, zipfile.ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(content)}\n")
        record.append(f"{info}/RECORD,,\n")
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD", _ZIP_TIME), "".join(record))
    return buffer.getvalue()
