"""The user's and the system's `uv.toml`: read once, where the driver runs, and given to uv on every node."""

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raycrew.venv_manager._spec import (
    OF_PROJECTS,
    EnvironmentSpec,
    inline_metadata,
    project_folder,
    read_toml,
    with_absolute_paths,
    workspace_root,
)
from raycrew.venv_manager._uv.pip_settings import pip_settings
from raycrew.venv_manager.errors import SpecError

# What says where this machine keeps things, or what another command of uv does.
_LEFT_OUT = frozenset({"cache-dir", "check-url", "publish-url", "trusted-publishing"})
_LEFT_OUT_OF_PIP = frozenset({
    "break-system-packages", "no-annotate", "no-header", "output-file", "prefix", "python", "system",
    "target", "universal",
})  # fmt: skip
_INDEXES = frozenset({"index", "index-url", "extra-index-url", "no-index"})
_YES = ("1", "true", "yes", "on")


def configuration_files(environ: Mapping[str, str]) -> Iterator[Path]:
    """The files that uv would read here, the user's before the system's; no others of any folder.

    Raises:
        SpecError: It cannot be told whether one is there.
    """
    if named := environ.get("UV_CONFIG_FILE"):
        yield Path(named).absolute()
        return
    if environ.get("UV_NO_CONFIG", "").lower() in _YES:
        return
    home = environ.get("HOME")
    users = environ.get("XDG_CONFIG_HOME") or (Path(home, ".config") if home else None)
    folders = (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)
    systems = [*(Path(folder, "uv", "uv.toml") for folder in folders), Path("/etc/uv/uv.toml")]
    found = [Path(users, "uv", "uv.toml")] if users else []
    found += [path for path in systems if _is_there(path)][:1]
    yield from (path for path in found if _is_there(path))


def _is_there(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error}; UV_NO_CONFIG=1 does without it") from error


def configured(environ: Mapping[str, str]) -> dict[str, Any]:
    """What the user and the system tell uv, as one: the user's counts more, lists are joined.

    Raises:
        SpecError: A file cannot be read.
    """
    levels = []
    for path in configuration_files(environ):
        data = {k: v for k, v in read_toml(path).items() if k not in _LEFT_OUT}
        if "pip" in data:
            data["pip"] = {k: v for k, v in data["pip"].items() if k not in _LEFT_OUT_OF_PIP}
        levels.append(with_absolute_paths(data, path.parent))
    found = _joined(*levels)
    no_index = pip_settings(environ).get("no-index", "").lower() in _YES
    named = any(
        environ.get(name) for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL")
    )
    if no_index and not named and not names_indexes(found):
        found["no-index"] = True
    return found


def names_indexes(settings: Mapping[str, Any]) -> bool:
    """Whether settings of uv say where packages come from, so that pip's configuration does not count."""
    return bool(_INDEXES & (settings.keys() | settings.get("pip", {}).keys()))


def told_to_uv(spec: EnvironmentSpec, environ: Mapping[str, str]) -> dict[str, Any]:
    """What a project or a script says to uv, and then the user and the system; paths are absolute.

    Raises:
        SpecError: A file cannot be read.
    """
    others = configured(environ)
    if spec.default_index or spec.indexes:
        others.pop("no-index", None)
    return _joined(_own(spec), others)


def _own(spec: EnvironmentSpec) -> dict[str, Any]:
    data: dict[str, Any] = {}
    base = Path()
    if spec.kind == "project":
        base = workspace_root(project_folder(spec))
        data = read_toml(base / "pyproject.toml")
        if (own := base / "uv.toml").is_file():  # in place of what the project file says to uv, as uv has it
            about_it = {k: v for k, v in data.get("tool", {}).get("uv", {}).items() if k in OF_PROJECTS}
            data = {"tool": {"uv": about_it | read_toml(own)}}
    elif spec.kind == "script":
        base = Path(spec.path).parent
        data = inline_metadata(Path(spec.path))
    told = data.get("tool", {}).get("uv", {})  # as for `uv run`, `tool.uv.pip` is not for it
    return with_absolute_paths({k: v for k, v in told.items() if k not in (*_LEFT_OUT, "pip")}, base)


def _joined(*levels: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of several files: the first that names one counts, tables and lists are joined."""
    found: dict[str, Any] = {}
    for level in levels:
        for name, value in level.items():
            mine = found.get(name)
            if isinstance(mine, list) and isinstance(value, list):
                found[name] = [*mine, *value]
            elif isinstance(mine, Mapping) and isinstance(value, Mapping):
                found[name] = _joined(mine, value)
            else:
                found.setdefault(name, value)
    return found
