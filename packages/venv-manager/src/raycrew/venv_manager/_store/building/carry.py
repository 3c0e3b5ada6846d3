"""The driver's own Ray and raycrew, which every environment brings along."""

import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from raycrew.venv_manager._spec import file_hash, folder_fingerprint, project_hash
from raycrew.venv_manager._store.building.wheels import build_wheel, content_fingerprint, repack
from raycrew.venv_manager.errors import InputsChangedError

_PREFIX = "raycrew-"
_SELF = "raycrew-venv-manager"  # works on the driver and on nodes, never inside an environment


@dataclass(frozen=True, slots=True)
class Carried:
    """One distribution of the driver that goes into an environment.

    Attributes:
        name: Canonical name.
        version: Its version.
        fingerprint: What its content hashes to.
        source: Folder of an editable installation, or None where a wheel was installed.
        requires: What it needs in turn.
    """

    name: str
    version: str
    fingerprint: str
    source: str | None = None
    requires: tuple[str, ...] = ()

    @property
    def content(self) -> str:
        """What of it counts in the digest of an environment."""
        return f"{self.version} {self.fingerprint[:16]}"


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
            "raycrew": {c.name: c.content for c in self.distributions},
            "requires": {c.name: [c.version, *c.requires] for c in self.distributions},
            "preferred": dict(self.versions),
        }


def luggage() -> Luggage:
    """What this process's environment has to give.

    Distributions are looked up anew only when a folder of `sys.path` has changed.
    """
    installed = _installed(_path_mark())
    carried = tuple(
        Carried(name, dist.version, _fingerprint(dist, source), source, _requires(source, needs))
        for name, dist, source, needs in installed.raycrew
        if name != _SELF
    )
    return Luggage(carried, installed.ray, installed.versions)


@dataclass(frozen=True)
class _Installed:
    raycrew: tuple[tuple[str, importlib.metadata.Distribution, str | None, tuple[str, ...]], ...]
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
        (name, dist, _editable(dist), tuple(sorted(dist.requires or ())))
        for name, dist in sorted(everything.items())
        if name.startswith(_PREFIX)
    )
    ray = everything["ray"].version if "ray" in everything else None
    wanted = _closure([n for n, *_ in ours if n != _SELF] + (["ray"] if ray else []), everything)
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
    return content_fingerprint(dist) if source is None else _of_source(source)


def _of_source(source: str) -> str:
    parts = [file_hash(Path(source, "pyproject.toml"))]
    parts += [folder_fingerprint(p) for p in (Path(source, "src"),) if p.is_dir()] or [
        folder_fingerprint(source)
    ]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _requires(source: str | None, needs: tuple[str, ...]) -> tuple[str, ...]:
    return needs if source is None else (*needs, project_hash(Path(source, "pyproject.toml")))


def wheel_of(carried: Carried, environ: Mapping[str, str]) -> tuple[str, bytes]:
    """File name and content of a wheel of a carried distribution.

    Raises:
        UvError: An editable source does not build.
        VenvError: An installed distribution cannot be repacked.
    """
    return _wheel(carried.name, carried.source, carried.fingerprint, tuple(sorted(environ.items())))


@lru_cache(maxsize=16)
def _wheel(
    name: str, source: str | None, fingerprint: str, environ: tuple[tuple[str, str], ...]
) -> tuple[str, bytes]:
    if source is not None:
        built = build_wheel(Path(source), name, dict(environ))
        if _of_source(source) != fingerprint:
            raise InputsChangedError(f"the files of {source} changed each time while it was built")
        return built
    return repack(importlib.metadata.distribution(name))
