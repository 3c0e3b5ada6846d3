"""`uv run …` command lines, read into specs."""

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raycrew.venv_manager._spec import EnvironmentSpec
from raycrew.venv_manager.errors import SpecError

# Flag to the field of the spec that it adds to.
_LISTS = {
    "--extra": "extras",
    "--no-extra": "no_extras",
    "--group": "groups",
    "--no-group": "no_groups",
    "--with": "packages",
    "--with-requirements": "requirement_files",
    "--index": "indexes",
    "--extra-index-url": "indexes",
    "--find-links": "find_links",
}
_VALUES = {
    "--package": "package",
    "--python": "python",
    "--default-index": "default_index",
    "--index-url": "default_index",
    "--directory": "directory",
    "--project": "project",
}
_SWITCHES: dict[str, dict[str, Any]] = {
    "--locked": {"locked": True},
    "--frozen": {"frozen": True},
    "--all-extras": {"extras": ["*"]},
    "--all-groups": {"groups": ["*"]},
    "--no-dev": {"no_groups": ["dev"]},
    "--no-default-groups": {"default_groups": False},
    "--offline": {"offline": True},
    "--no-project": {"no_project": True},
    "--script": {"script": True},
    # These change how uv talks or keeps an environment up to date, not what is in it.
    **{
        flag: {}
        for flag in (
            "--no-editable",
            "--exact",
            "--isolated",
            "--no-progress",
            "--quiet",
            "--verbose",
            "--no-config",
        )
    },
}
_SHORT = {
    "-p": "--python", "-w": "--with", "-i": "--index-url", "-f": "--find-links", "-s": "--script",
    "-q": "--quiet", "-v": "--verbose",
}  # fmt: skip
_LEADS = {"--only-group": "groups", "--only-dev": "dev"}


@dataclass
class _Flags:
    lists: dict[str, list[str]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)

    def add(self, name: str, values: Sequence[str]) -> None:
        self.lists.setdefault(name, []).extend(values)


def parse(given: "str | Path | EnvironmentSpec", cwd: Path | None = None) -> EnvironmentSpec:
    """A spec from any form that people write.

    Args:
        given: A spec, a `uv run …` command line, or the path of an interpreter, a project's folder, a script,
            a requirements file or a `pylock.toml`.
        cwd: Folder that relative paths start from; the current one by default.

    Raises:
        SpecError: It is none of these, or a flag is not known.
    """
    if isinstance(given, EnvironmentSpec):
        return given
    if not str(given).strip():
        raise SpecError("an empty environment specification")
    base = (cwd or Path.cwd()).absolute()
    if isinstance(given, str):
        words = shlex.split(given)
        if Path(words[0]).name == "uv" and len(words) > 1:
            if words[1] != "run":
                raise SpecError(f"only `uv run …` describes an environment, not `uv {words[1]}`: {given}")
            return _from_flags(_read(words[2:], given), base, given)
    return _from_path(base / Path(given).expanduser())


def _from_path(path: Path) -> EnvironmentSpec:
    if path.is_dir() or path.name == "pyproject.toml":
        return EnvironmentSpec.project(path)
    if path.name.startswith("pylock.") and path.suffix == ".toml":
        return EnvironmentSpec.pylock(path)
    if path.suffix == ".py":
        return EnvironmentSpec.script(path)
    if path.suffix in (".txt", ".in"):
        return EnvironmentSpec.requirements(path)
    if path.is_file() and os.access(path, os.X_OK):
        return EnvironmentSpec.interpreter(path)
    raise SpecError(
        f"{path} is not an interpreter, a folder with a pyproject.toml, a script, a requirements file or a "
        "pylock.toml; a command line starts with `uv run`"
    )


def _read(words: Sequence[str], given: str) -> _Flags:
    flags = _Flags()
    rest = iter(words)
    for word in rest:
        if word == "--":
            flags.command = list(rest)
        elif not word.startswith("-"):
            flags.command = [word, *rest]
        else:
            _read_flag(word, rest, flags, given)
    return flags


def _read_flag(word: str, rest: Iterator[str], flags: _Flags, given: str) -> None:
    name, equals, value = word.partition("=")
    if not name.startswith("--") and len(name) > 2:
        name, equals, value = name[:2], "=", word[2:].removeprefix("=")
    name = _SHORT.get(name, name)

    def argument() -> str:
        found = value if equals else next(rest, "")
        if not found:
            raise SpecError(f"{name} needs a value: {given}")
        return found

    if name in _LISTS:
        flags.add(_LISTS[name], [argument()])
    elif name in _VALUES:
        flags.values[_VALUES[name]] = argument()
    elif name in _LEADS:
        flags.add("groups", ["dev"] if name == "--only-dev" else [argument()])
        flags.values["only_groups"] = True
    elif name in _SWITCHES and not equals:
        for key, setting in _SWITCHES[name].items():
            if isinstance(setting, list):
                flags.add(key, setting)
            else:
                flags.values[key] = setting
    else:
        known = ", ".join(sorted([*_LISTS, *_VALUES, *_LEADS, *_SWITCHES]))
        raise SpecError(f"{name} of `{given}` is not understood; understood are {known}")


def _from_flags(flags: _Flags, base: Path, given: str) -> EnvironmentSpec:
    values = flags.values
    here = base / Path(values.pop("directory", ".")).expanduser()
    project = values.pop("project", None)
    no_project, script = values.pop("no_project", False), values.pop("script", False)
    if not here.is_dir():
        raise SpecError(f"--directory {here} does not exist: {given}")
    flags.lists["requirement_files"] = [
        str((here / f).resolve()) for f in flags.lists.get("requirement_files", [])
    ]
    options: dict[str, Any] = {k: tuple(v) for k, v in flags.lists.items() if v} | values
    if flags.command and (script or flags.command[0].endswith(".py")):
        path = here / flags.command[0]
        if script or (path.is_file() and "# /// script" in path.read_text(encoding="utf-8")):
            return EnvironmentSpec.script(path, **options)
    elif flags.command and Path(flags.command[0]).name not in ("python", "python3"):
        raise SpecError(f"`{given}` runs {flags.command[0]!r}: an environment is only asked for its Python")
    if no_project:
        return EnvironmentSpec("requirements", **options)
    return EnvironmentSpec.project(_discover(here / project if project else here, given), **options)


def _discover(start: Path, given: str) -> Path:
    for folder in (start.resolve(), *start.resolve().parents):
        if (folder / "pyproject.toml").is_file():
            return folder
    raise SpecError(f"there is no pyproject.toml in {start} nor above it: {given}")
