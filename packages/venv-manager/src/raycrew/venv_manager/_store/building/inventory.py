"""What lies in an environment: sizes, links, and whether every package is whole."""

import base64
import csv
import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.utils import canonicalize_name

from raycrew.venv_manager._store.building.versions import is_version, same_version

# Files about an installed distribution; some packages bring others inside theirs, which do not count.
_OWN = re.compile(r"lib/python[^/]+/site-packages/(?P<label>[^/]+)\.dist-info/(?P<file>METADATA|RECORD)")


@dataclass(frozen=True, slots=True)
class Inventory:
    """The files of an environment.

    Attributes:
        files: Path within the environment to size in bytes and time of its last change in ns; no bytecode.
        packages: Distribution to version.
        size_bytes: All files, bytecode included.
        own_bytes: Those of them that no other folder shares through hard links.
        link_mode: How most of them came here: hardlink, symlink, or copy (which a clone looks like, too).
    """

    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    size_bytes: int = 0
    own_bytes: int = 0
    link_mode: str = "copy"


def take(root: Path) -> Inventory:
    """Walk an environment. Each build waits for it, so that it is one loop with little in it."""
    files: dict[str, tuple[int, int]] = {}
    size = own = symlinks = hardlinks = copies = 0
    base, waiting = f"{root}{os.sep}", [""]
    while waiting:
        folder = waiting.pop()
        is_bytecode = "__pycache__" in folder
        is_package = "site-packages" in folder and ".dist-info" not in folder
        with os.scandir(base + folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{folder}{entry.name}{os.sep}")
                    continue
                stat = entry.stat(follow_symlinks=False)
                size += stat.st_size
                if stat.st_nlink == 1:
                    own += stat.st_size
                if is_bytecode:
                    continue
                files[folder + entry.name] = (stat.st_size, stat.st_mtime_ns)
                if is_package:
                    if entry.is_symlink():
                        symlinks += 1
                    elif stat.st_nlink > 1:
                        hardlinks += 1
                    else:
                        copies += 1
    _, mode = max((copies, "copy"), (hardlinks, "hardlink"), (symlinks, "symlink"), key=lambda pair: pair[0])
    return Inventory(files, _packages(root, files), size, own, mode)


def _packages(root: Path, files: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in files:
        if name.endswith(".dist-info/METADATA") and (match := _OWN.fullmatch(name)):
            package, _, version = match["label"].partition("-")
            found[canonicalize_name(package)] = (
                version if is_version(version) else _said(root / name, version)
            )
    return dict(sorted(found.items()))


def _said(metadata: Path, folder: str) -> str:
    """A version as the package says it, where a folder's name cannot hold it."""
    for line in metadata.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("Version:"):
            return line.partition(":")[2].strip()
    return folder


def absent(packages: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Which of the expected packages are not there, or in another version."""
    return [
        f"{name} {version} ({'absent' if name not in packages else f'{packages[name]} is there'})"
        for name, version in sorted(expected.items())
        if not same_version(packages.get(name), version)
    ]


def altered(root: Path, inventory: Inventory) -> list[str]:
    """Files whose content does not have the checksum that their package's own record gives.

    Files that a record lists and that are absent do not count: some published wheels (Ray's among them) list
    files that they do not hold.
    """
    wrong = []
    for record in inventory.files:
        if not ((match := _OWN.fullmatch(record)) and match["file"] == "RECORD"):
            continue
        base = Path(record).parent.parent
        with (root / record).open(encoding="utf-8", newline="") as file:
            for name, checksum, *_ in csv.reader(file):
                path = os.path.normpath(base / name)
                if (
                    checksum.startswith("sha256=")
                    and path in inventory.files
                    and _sha256(root / path) != checksum
                ):
                    wrong.append(path)
    return sorted(wrong)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
