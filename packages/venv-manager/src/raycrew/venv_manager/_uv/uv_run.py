"""`uv run …` command lines, read into specs."""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raycrew.venv_manager._spec import EnvironmentSpec, absolute_requirement, without_credentials
from raycrew.venv_manager.errors import SpecError

# Flag to the field of the spec that it adds to.
_LISTS = {
    "--extra": "extras",
    "--no-extra": "no_extras",
    "--group": "groups",
    "--no-group": "no_groups",
    "--with": "packages",
    "--with-editable": "packages",
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
    "--only-dev": {"groups": ["dev"], "only_groups": True},
    "--script": {"script": True},
}
# Flag to the variable that says the same to every command of uv.
_VARIABLES = {
    "--allow-insecure-host": "UV_INSECURE_HOST",
    "--cache-dir": "UV_CACHE_DIR",
    "--exclude-newer": "UV_EXCLUDE_NEWER",
    "--fork-strategy": "UV_FORK_STRATEGY",
    "--index-strategy": "UV_INDEX_STRATEGY",
    "--keyring-provider": "UV_KEYRING_PROVIDER",
    "--link-mode": "UV_LINK_MODE",
    "--prerelease": "UV_PRERELEASE",
    "--resolution": "UV_RESOLUTION",
}
_VARIABLE_SWITCHES = {
    "--compile-bytecode": ("UV_COMPILE_BYTECODE", "1"),
    "--managed-python": ("UV_MANAGED_PYTHON", "1"),
    "--native-tls": ("UV_NATIVE_TLS", "1"),
    "--no-binary": ("UV_NO_BINARY", "1"),
    "--no-build": ("UV_NO_BUILD", "1"),
    "--no-cache": ("UV_NO_CACHE", "1"),
    "--no-managed-python": ("UV_NO_MANAGED_PYTHON", "1"),
    "--no-python-downloads": ("UV_PYTHON_DOWNLOADS", "never"),
    "--system-certs": ("UV_SYSTEM_CERTS", "1"),
}
# These change how uv talks or keeps an environment up to date, not what is in one that is built once.
_IGNORED = frozenset(
    {"--no-editable", "--exact", "--isolated", "--no-env-file", "--no-progress", "--quiet", "--verbose"}
)
_IGNORED_VALUES = frozenset({"--color", "--no-editable-package"})
_SHORT = {
    "-p": "--python", "-w": "--with", "-i": "--index-url", "-f": "--find-links", "-s": "--script",
    "-n": "--no-cache", "-q": "--quiet", "-v": "--verbose",
}  # fmt: skip
_TAKE_VALUES = frozenset({*_LISTS, *_VALUES, *_VARIABLES, *_IGNORED_VALUES, "--only-group"})
_TAKE_NONE = frozenset({*_SWITCHES, *_VARIABLE_SWITCHES, *_IGNORED})
_NEVER_CHANGED = "an environment keeps its versions until `ensure --upgrade` chooses them anew"
_ONLY_PYTHON = "an environment is only asked for its Python"
_REASONS = {
    **dict.fromkeys(("-U", "--upgrade", "-P", "--upgrade-package", "--upgrade-group"), _NEVER_CHANGED),
    **dict.fromkeys(("--reinstall", "--reinstall-package", "--refresh", "--refresh-package"), _NEVER_CHANGED),
    **dict.fromkeys(("-m", "--module", "--gui-script", "--env-file"), _ONLY_PYTHON),
    **dict.fromkeys(("--active", "--no-sync"), "environments lie in the store, each for one specification"),
}


@dataclass
class _Flags:
    lists: dict[str, list[str]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
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
            shown = without_credentials(given)  # in errors
            return _from_flags(_read(words[1:], shown), base, shown)
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
    """The flags before and after `run`, and the command that follows."""
    flags, subcommand = _Flags(), ""
    rest = iter(words)
    for word in rest:
        if word == "--":
            flags.command = list(rest)
        elif word.startswith("-"):
            _read_flag(word, rest, flags, given)
        elif subcommand:
            flags.command = [word, *rest]
        else:
            subcommand = word
            if word != "run":
                break
    if subcommand != "run":
        raise SpecError(f"only `uv run …` describes an environment, not `uv {subcommand}`: {given}")
    return flags


def _read_flag(word: str, rest: Iterator[str], flags: _Flags, given: str) -> None:
    name, equals, value = word.partition("=")
    if re.fullmatch("-[qv]{2,}", name):
        return
    if not name.startswith("--") and len(name) > 2:
        name, equals, value = name[:2], "=", word[2:].removeprefix("=")
    name = _SHORT.get(name, name)

    if name in _TAKE_VALUES:
        found = value if equals else next(rest, "")
        if not found:
            raise SpecError(f"{name} needs a value: {given}")
        _take_value(name, found, flags)
    elif name in _TAKE_NONE and not equals:
        _take_switch(name, flags)
    else:
        why = _REASONS.get(name, "understood are " + ", ".join(sorted(_TAKE_VALUES | _TAKE_NONE)))
        raise SpecError(f"{name} of `{given}` describes no environment: {why}")


def _take_value(name: str, value: str, flags: _Flags) -> None:
    if name in _LISTS:
        flags.add(_LISTS[name], _several(name, value))
    elif name in _VALUES:
        flags.values[_VALUES[name]] = value
    elif name in _VARIABLES:
        flags.variables[_VARIABLES[name]] = value
    elif name == "--only-group":
        flags.add("groups", [value])
        flags.values["only_groups"] = True


def _take_switch(name: str, flags: _Flags) -> None:
    for key, setting in _SWITCHES.get(name, {}).items():
        if isinstance(setting, list):
            flags.add(key, setting)
        else:
            flags.values[key] = setting
    if name in _VARIABLE_SWITCHES:
        variable, setting = _VARIABLE_SWITCHES[name]
        flags.variables[variable] = setting


def _several(name: str, value: str) -> list[str]:
    """What uv splits at commas, but not those in `demo>1,<2` or in `demo[a,b]`."""
    if name == "--with":
        return [text.strip() for text in re.split(r",(?![^\[]*\])(?=\s*[A-Za-z0-9./])", value)]
    if name == "--with-editable" and value[0] not in "./~" and "://" not in value:
        return [f"./{value}"]
    return value.split(",") if name in ("--extra", "--no-extra") else [value]


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
    flags.lists["packages"] = [absolute_requirement(text, here) for text in flags.lists.get("packages", [])]
    if "python" in values:
        values["python"] = _interpreter(values["python"], here)
    if "UV_CACHE_DIR" in flags.variables:
        flags.variables["UV_CACHE_DIR"] = str((here / flags.variables["UV_CACHE_DIR"]).resolve())
    options: dict[str, Any] = {k: tuple(v) for k, v in flags.lists.items() if v} | values
    if flags.variables:
        options["environment"] = tuple(flags.variables.items())
    if flags.command and (script or flags.command[0].endswith(".py")):
        path = here / flags.command[0]
        if script or (path.is_file() and "# /// script" in path.read_text(encoding="utf-8")):
            return EnvironmentSpec.script(path, **options)
    elif flags.command and Path(flags.command[0]).name not in ("python", "python3"):
        raise SpecError(f"`{given}` runs {flags.command[0]!r}: an environment is only asked for its Python")
    if no_project:
        return EnvironmentSpec("requirements", **options)
    return EnvironmentSpec.project(_discover(here / project if project else here, given), **options)


def _interpreter(asked: str, here: Path) -> str:
    """A version as it is; what is there by that name, as uv has it, by its whole path."""
    path = here / Path(asked).expanduser()
    is_version = re.match(r"[a-z]*@?\d", asked) is not None
    return str(path.absolute()) if "/" in asked or (path.exists() and not is_version) else asked


def _discover(start: Path, given: str) -> Path:
    for folder in (start.resolve(), *start.resolve().parents):
        if (folder / "pyproject.toml").is_file():
            return folder
    raise SpecError(f"there is no pyproject.toml in {start} nor above it: {given}")
