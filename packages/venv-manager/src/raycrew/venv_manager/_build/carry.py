"""The driver's own Ray and raycrew, which every environment brings along."""

import base64
import csv
import hashlib
import importlib.metadata
import io
import json
import sys
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlparse

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from raycrew.venv_manager._waiting import scratch
from raycrew.venv_manager._spec import file_hash, folder_fingerprint, read_toml
from raycrew.venv_manager._uv import run_uv
from raycrew.venv_manager.errors import VenvError

_PREFIX = "raycrew-"
_SELF = "raycrew-venv-manager"  # works on the driver and on nodes, never inside an environment
_LEFT_OUT = frozenset(
    {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json"}
)
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Carried:
    """One distribution of the driver that goes into an environment.

    Attributes:
        name: Canonical name.
        version: Its version.
        fingerprint: What its content hashes to.
        source: Folder of an editable installation, or None where a wheel was installed.
    """

    name: str
    version: str
    fingerprint: str
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Luggage:
    """All that the driver's environment gives to others.

    Attributes:
        distributions: raycrew's distributions.
        ray: Version of the driver's Ray, or None without one.
        versions: Versions of what those depend on, preferred when an environment leaves them open.
    """

    distributions: tuple[Carried, ...] = ()
    ray: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """What of it counts in the digest of an environment."""
        return {
            "ray": self.ray,
            "raycrew": {c.name: f"{c.version} {c.fingerprint[:16]}" for c in self.distributions},
            "preferred": dict(self.versions),
        }


def luggage() -> Luggage:
    """What this process's environment has to give.

    Distributions are looked up anew only when a folder of `sys.path` has changed.
    """
    installed = _installed(_path_mark())
    carried = tuple(
        Carried(name, dist.version, _fingerprint(dist, source), source)
        for name, dist, source in installed.raycrew
        if name != _SELF
    )
    return Luggage(carried, installed.ray, installed.versions)


@dataclass(frozen=True)
class _Installed:
    raycrew: tuple[tuple[str, importlib.metadata.Distribution, str | None], ...]
    ray: str | None
    versions: Mapping[str, str]


def _path_mark() -> tuple[tuple[str, int], ...]:
    marks = []
    for entry in sys.path:
        try:
            marks.append((entry, Path(entry or ".").stat().st_mtime_ns))
        except OSError:
            continue
    return tuple(marks)


@lru_cache(maxsize=4)
def _installed(_mark: tuple[tuple[str, int], ...]) -> _Installed:
    everything: dict[str, importlib.metadata.Distribution] = {}
    for dist in importlib.metadata.distributions():
        name = dist.metadata["Name"]
        if name:
            everything.setdefault(canonicalize_name(name), dist)
    ours = tuple(
        (name, dist, _editable(dist)) for name, dist in sorted(everything.items()) if name.startswith(_PREFIX)
    )
    ray = everything["ray"].version if "ray" in everything else None
    wanted = _closure([n for n, _, _ in ours if n != _SELF] + (["ray"] if ray else []), everything)
    versions = {n: everything[n].version for n in sorted(wanted) if not n.startswith(_PREFIX)}
    return _Installed(ours, ray, versions)


def _closure(names: Iterable[str], everything: Mapping[str, importlib.metadata.Distribution]) -> set[str]:
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found or name not in everything:
            continue
        found.add(name)
        for text in everything[name].requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(canonicalize_name(requirement.name))
    return found


def _editable(dist: importlib.metadata.Distribution) -> str | None:
    try:
        url = json.loads(dist.read_text("direct_url.json") or "{}")
    except json.JSONDecodeError:
        return None
    if not url.get("dir_info", {}).get("editable"):
        return None
    return unquote(urlparse(url["url"]).path)


def _fingerprint(dist: importlib.metadata.Distribution, source: str | None) -> str:
    if source is not None:
        parts = [file_hash(Path(source, "pyproject.toml"))]
        parts += [folder_fingerprint(p) for p in (Path(source, "src"),) if p.is_dir()] or [
            folder_fingerprint(source)
        ]
        return hashlib.sha256("".join(parts).encode()).hexdigest()
    return hashlib.sha256((dist.read_text("RECORD") or "").encode()).hexdigest()


def wheel_of(carried: Carried, environ: Mapping[str, str]) -> tuple[str, bytes]:
    """File name and content of a wheel of a carried distribution.

    Raises:
        UvError: An editable source does not build.
        VenvError: An installed distribution cannot be repacked.
    """
    return _wheel(carried.name, carried.source, carried.fingerprint, tuple(sorted(environ.items())))


@lru_cache(maxsize=16)
def _wheel(
    name: str, source: str | None, _fingerprint: str, environ: tuple[tuple[str, str], ...]
) -> tuple[str, bytes]:
    if source is not None:
        return build_wheel(Path(source), dict(environ))
    return repack(importlib.metadata.distribution(name))


def build_wheel(
    source: Path, environ: Mapping[str, str], python: str | None = None, *, timeout_s: float = 3600.0
) -> tuple[str, bytes]:
    """Build a wheel of a source folder; with the driver's own build backend where that is installed.

    Raises:
        UvError: It does not build.
    """
    with scratch("raycrew-venv-wheel-") as folder:
        isolation = ["--no-build-isolation"] if python is None and _backend_is_here(source) else []
        command: list[str | Path] = [
            "build",
            "--wheel",
            *isolation,
            "--python",
            python or sys.executable,
            "--out-dir",
            folder,
            source,
        ]
        run_uv(command, environ=environ, timeout_s=timeout_s)
        wheels = sorted(folder.glob("*.whl"))
        if len(wheels) != 1:
            raise VenvError(f"building {source} gave {len(wheels)} wheels instead of one")
        return wheels[0].name, wheels[0].read_bytes()


def _backend_is_here(source: Path) -> bool:
    file = source / "pyproject.toml"
    build_system = read_toml(file).get("build-system", {}) if file.is_file() else {}
    try:
        needed = [Requirement(text) for text in build_system["requires"]]
        return all(r.specifier.contains(importlib.metadata.version(r.name), prereleases=True) for r in needed)
    except (KeyError, importlib.metadata.PackageNotFoundError):
        return False


def repack(dist: importlib.metadata.Distribution) -> tuple[str, bytes]:
    """The wheel that an installed distribution came from, put together again from its RECORD.

    Raises:
        VenvError: It was not installed from a wheel, or files of it are gone.
    """
    name = canonicalize_name(dist.metadata["Name"]).replace("-", "_")
    tags = [
        line.split(":", 1)[1].strip()
        for line in (dist.read_text("WHEEL") or "").splitlines()
        if "Tag:" in line
    ]
    listed = sorted(row[0] for row in csv.reader((dist.read_text("RECORD") or "").splitlines()) if row)
    if not listed or not tags:
        raise VenvError(f"{name} {dist.version} has no RECORD or WHEEL file: reinstall it from a wheel")
    rows: list[tuple[str, bytes]] = []
    info = ""
    for text in listed:
        path = PurePosixPath(text)
        if path.parts[0].endswith(".dist-info"):
            info = path.parts[0]
        if (
            text.startswith("..")
            or path.suffix == ".pyc"
            or (".dist-info" in text and path.name in _LEFT_OUT)
        ):
            continue
        try:
            rows.append((text, Path(str(dist.locate_file(text))).read_bytes()))
        except OSError as error:
            raise VenvError(f"{name} {dist.version} is damaged, reinstall it: {error}") from error
    return f"{name}-{dist.version}-{_joined(tags)}.whl", pack(rows, info)


def _joined(tags: list[str]) -> str:
    """Several tags of one wheel as its file name has them."""
    parts = [tag.split("-") for tag in tags]
    return "-".join(".".join(dict.fromkeys(p[i] for p in parts)) for i in range(3))


def pack(rows: Iterable[tuple[str, bytes]], info: str) -> bytes:
    """A wheel of (path, content) pairs, with its RECORD, the same bytes each time."""
    buffer = io.BytesIO()
    record = []
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in rows:
            archive.writestr(zipfile.ZipInfo(path, _ZIP_TIME), content, zipfile.ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(content)}\n")
        record.append(f"{info}/RECORD,,\n")
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD", _ZIP_TIME), "".join(record))
    return buffer.getvalue()
