"""A diagnosis in a folder of its own, which nobody but the user may read."""

import json
import re
import tempfile
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

from raycrew.worker_groups._health.diagnosis.diagnosis import Diagnosis


def check_folder(option: str, within: str | PathLike[str] | None) -> None:
    """Refuse what can be no folder, before anything is found out to be left in it.

    Raises:
        ValueError: It, or a part of its path, is something else.
    """
    path = Path(within or ".").absolute()
    there = next(part for part in (path, *path.parents) if part.exists() or part.is_symlink())
    if not there.is_dir():
        raise ValueError(f"{option} is {str(within)!r}, and {there} is no folder: name one, or a new one")


def new_folder(group_name: str, within: str | PathLike[str] | None) -> Path:
    """A folder of its own, of mode 0700, in the one that is named, else in that for temporary files."""
    if within is not None:
        Path(within).mkdir(parents=True, exist_ok=True)
    plain = re.sub(r"[^\w.-]+", "_", group_name)[:64]
    return Path(tempfile.mkdtemp(prefix=f"raycrew-diagnosis-{plain}-", dir=within)).absolute()


def write(diagnosis: Diagnosis, records: Mapping[str, bytes]) -> None:
    """Write a diagnosis into its folder.

    Args:
        diagnosis: The diagnosis.
        records: Files besides, by name within the folder.
    """
    folder = diagnosis.folder
    (folder / "diagnosis.txt").write_text(diagnosis.text, encoding="utf-8", errors="backslashreplace")
    told = json.dumps(diagnosis.as_dict(), indent=1)
    (folder / "diagnosis.json").write_text(told, encoding="utf-8")
    for name, content in records.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
