"""What a published environment says of itself: its stamp, written last."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raycrew.venv_manager._store.building import PYTHON

STAMP = "stamp.json"
_PARTS = {
    "created": str, "spec": dict, "label": str, "identity": dict, "expectation": list, "python": str,
    "packages": dict, "size_bytes": int, "own_bytes": int, "link_mode": str, "seconds": dict,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Environment:
    """One published environment.

    Attributes:
        key: The digest that it is named by.
        path: Its folder in the store.
        stamp: What was written when it was published: spec, versions, sizes, seconds of each step, link mode.
    """

    key: str
    path: Path
    stamp: Mapping[str, Any]

    @property
    def python(self) -> Path:
        """Path of its interpreter."""
        return self.path / PYTHON

    @property
    def built_at(self) -> Path | None:
        """The folder that it was built in, where that is another one: the store was moved since."""
        named = self.stamp.get("path", str(self.path))
        return None if _same(str(named), str(self.path)) else Path(named)


def _same(one: str, other: str) -> bool:
    return one == other or os.path.realpath(one) == os.path.realpath(other)


def read_stamp(entry: Path) -> dict[str, Any] | None:
    """The stamp of an environment, or None where there is none, or a damaged one."""
    try:
        stamp = json.loads((entry / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    whole = isinstance(stamp, dict) and all(isinstance(stamp.get(n), kind) for n, kind in _PARTS.items())
    return stamp if whole else None
