"""Lock files in the standard format (PEP 751): read, joined, and made independent of local folders."""

import hashlib
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.utils import canonicalize_name

from raycrew.venv_manager.errors import SpecError, fault_of

HEADER = 'lock-version = "1.0"\ncreated-by = "raycrew-venv-manager"\n'
_LOCAL = re.compile(r"^\s*source\s*=\s*\{\s*(directory|editable|path)\s*=", re.MULTILINE)
_BLOCK = re.compile(r"^\[\[packages\]\]\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Package:
    """One entry of a lock: its values and its text."""

    data: Mapping[str, Any]
    text: str

    @property
    def name(self) -> str:
        """Canonical name."""
        return str(canonicalize_name(self.data["name"]))

    @property
    def pin(self) -> str | None:
        """The entry as an exact requirement, or None where it has no version."""
        version, marker = self.data.get("version"), self.data.get("marker")
        if version is None:
            return None
        return f"{self.name}=={version}" + (f" ; {marker}" if marker else "")

    @property
    def local_path(self) -> str | None:
        """The folder or file of this machine that the entry is built from, as the lock names it."""
        directory = self.data.get("directory", {})
        path = directory.get("path") or self.data.get("archive", {}).get("path")
        return str(Path(path, directory.get("subdirectory", ""))) if path else None

    def applies(self, target: Callable[[], Mapping[str, str]]) -> bool:
        """Whether it is installed on a target, which is asked for its marker values only where one counts."""
        marker = self.data.get("marker")
        return marker is None or Marker(marker).evaluate(dict(target()), context="lock_file")


def read_lock(text: str) -> list[Package]:
    """The entries of a lock file.

    Raises:
        ValueError: It is not TOML, or its entries are not written as `[[packages]]`.
    """
    entries = tomllib.loads(text).get("packages", [])
    blocks = _BLOCK.split(text)[1:]
    if len(entries) != len(blocks):
        raise ValueError(f"{len(entries)} packages, but {len(blocks)} entries [[packages]]")
    return [
        Package(data, f"[[packages]]{block.rstrip()}\n") for data, block in zip(entries, blocks, strict=True)
    ]


def read_lock_file(path: Path) -> list[Package]:
    """The entries of a lock file on the disk.

    Raises:
        SpecError: It cannot be read.
    """
    try:
        return read_lock(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"{path} is no lock file that can be read: {fault_of(error)}") from None


def names_local_sources(lock: Path) -> bool:
    """Whether a lock file of uv names folders or files of this machine that packages are built from.

    It is not parsed, which takes long in Python.
    """
    return _LOCAL.search(lock.read_text(encoding="utf-8")) is not None


def locked_versions(text: str) -> list[tuple[str, str | None, tuple[str, ...]]]:
    """What a lock comes to, wherever its files lie: names, versions and hashes, sorted.

    The hash of a wheel that was built here counts no moments: its content is told by what it was built from.

    Raises:
        ValueError: It is no lock that can be read.
    """
    return sorted((p.name, p.data.get("version"), tuple(sorted(_hashes(p.data)))) for p in read_lock(text))


def _hashes(data: Mapping[str, Any]) -> Iterator[str]:
    files = [*data.get("wheels", ()), data.get("sdist", {}), data.get("archive", {})]
    for file in files:
        if "path" not in file:
            yield from file.get("hashes", {}).values()
    if "vcs" in data:
        yield str(data["vcs"].get("commit-id"))


def write_lock(packages: Iterable[Package]) -> str:
    """A lock file of these entries."""
    entries = [p.text for p in sorted(packages, key=lambda p: p.name)]
    return "\n".join([HEADER, *(entries or ["packages = []\n"])])


def wheel_entry(file_name: str, content: bytes) -> Package:
    """The entry of a wheel that lies in the folder `wheels` beside the lock."""
    name, version = file_name.split("-")[:2]
    digest = hashlib.sha256(content).hexdigest()
    text = (
        f'[[packages]]\nname = "{canonicalize_name(name)}"\nversion = "{version}"\n'
        f'wheels = [{{ path = "wheels/{file_name}", hashes = {{ sha256 = "{digest}" }} }}]\n'
    )
    return Package(tomllib.loads(text)["packages"][0], text)


def preferred_versions(versions: Mapping[str, str]) -> str:
    """A lock that only says which versions to prefer."""
    blocks = (f'[[packages]]\nname = "{name}"\nversion = "{version}"\n' for name, version in versions.items())
    return "\n".join([HEADER, *blocks])
