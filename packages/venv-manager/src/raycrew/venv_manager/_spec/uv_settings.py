"""What a project or a script tells uv about versions and builds, as a file of its own."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from raycrew.venv_manager._spec.local import (
    absolute_requirement,
    local_requirement,
    required_name,
    sources_named,
    without_credentials,
)
from raycrew.venv_manager._spec.spec import EnvironmentSpec
from raycrew.venv_manager.errors import SpecError, fault_of

# Fields of `[tool.uv]` that describe a project, which no `uv.toml` may have.
OF_PROJECTS = frozenset({
    "build-backend", "cache-keys", "conflicts", "default-groups", "dependency-groups", "dev-dependencies",
    "environments", "managed", "package", "required-environments", "required-version", "sources", "workspace",
})  # fmt: skip
# Those that change how files come to their places, not which.
_HARMLESS = frozenset({
    "allow-insecure-host", "cache-dir", "cache-keys", "compile-bytecode", "concurrent-builds",
    "concurrent-downloads", "concurrent-installs", "keyring-provider", "link-mode", "native-tls", "no-cache",
    "offline", "preview", "python-downloads", "python-install-mirror", "pypy-install-mirror", "system-certs",
})  # fmt: skip
_INDEXES = ("index", "index-url", "extra-index-url", "find-links", "pip")
_INLINE = re.compile(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$")


def settings(told: Mapping[str, Any], spec: EnvironmentSpec, places: Mapping[str, str] | None = None) -> str:
    """A `uv.toml` with what uv is told about versions and builds, without credentials.

    Args:
        told: The settings of the project or the script, the user and the system, with absolute paths.
        spec: What to build.
        places: Name to URL of what asks for credentials and is not named there: explicit indexes, which serve
            nothing by themselves, tell uv by which name it is given a user and a password.
    """
    chosen = _effective(told, spec)
    if places:
        named = [{"name": name, "url": url, "explicit": True} for name, url in sorted(places.items())]
        chosen["index"] = [*chosen.get("index", ()), *named]
    if spec.wheelhouse:
        chosen.pop("index", None)
        chosen["no-index"] = True
    lines = (f"{name} = {_toml(value)}\n" for name, value in sorted(chosen.items()))
    return without_credentials("".join(lines))


def _effective(told: Mapping[str, Any], spec: EnvironmentSpec) -> dict[str, Any]:
    """Those that reach uv: what describes a project does not, nor do indexes where there is a wheelhouse."""
    left_out = {*OF_PROJECTS, *(_INDEXES if spec.wheelhouse else ())}
    return {k: v for k, v in told.items() if k not in left_out}


def counted_settings(told: Mapping[str, Any], spec: EnvironmentSpec) -> dict[str, str]:
    """What counts of settings that reach uv, as text, without credentials."""
    counted = {k: v for k, v in _effective(told, spec).items() if k not in _HARMLESS}
    return {name: without_credentials(_toml(value)) for name, value in counted.items()}


def with_absolute_paths(told: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """The same settings, with the folders that they name as indexes found from anywhere."""
    found = dict(told)
    if "find-links" in found:
        found["find-links"] = [_absolute(text, base) for text in found["find-links"]]
    if "index" in found:
        found["index"] = [{**index, "url": _absolute(index["url"], base)} for index in found["index"]]
    if "extra-build-dependencies" in found:
        found["extra-build-dependencies"] = dict(_builds(told, base))
    return found


def extra_requirements(told: Mapping[str, Any], package: str) -> list[str]:
    """What settings of uv say that the build of a package requires beside what it says itself."""
    return [
        one["requirement"] if isinstance(one, Mapping) else one
        for name, needed in told.get("extra-build-dependencies", {}).items()
        if canonicalize_name(name) == canonicalize_name(package)
        for one in needed
    ]


def _builds(told: Mapping[str, Any], base: Path) -> Iterator[tuple[str, list[Any]]]:
    """What the builds of some packages require more, with the places of local sources."""
    places: dict[str, Path] = {
        canonicalize_name(str(name)): path for name, path in sources_named(told.get("sources", {}), base)
    }
    for package, needed in told["extra-build-dependencies"].items():
        yield (
            package,
            [
                {**one, "requirement": _placed(one["requirement"], base, places)}
                if isinstance(one, Mapping)
                else _placed(one, base, places)
                for one in needed
            ],
        )


def _placed(text: str, base: Path, places: Mapping[str, Path]) -> str:
    """The same requirement, with the place of a local source."""
    path = places.get(required_name(text) or "")
    if path is None or local_requirement(text, base) is not None:
        return absolute_requirement(text, base)
    found = Requirement(text)
    found.url, found.specifier = path.as_uri(), SpecifierSet()
    return str(found)


def _absolute(text: str, base: Path) -> str:
    return text if re.match(r"[a-z][a-z0-9+.-]*://", text) else str((base / text).resolve())


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(str(k))} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, (datetime, date)):
        return json.dumps(value.isoformat())
    return json.dumps(value, ensure_ascii=False)


def inline_metadata(script: Path) -> dict[str, Any]:
    """The inline metadata of a script (PEP 723).

    Raises:
        SpecError: It has none, or it is not TOML.
    """
    match = _INLINE.search(script.read_text(encoding="utf-8"))
    if match is None:
        raise SpecError(f"{script} has no complete block of inline metadata")
    lines = (line[2:] if line.startswith("# ") else line[1:] for line in match["content"].splitlines())
    try:
        return tomllib.loads("\n".join(lines))
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"the inline metadata of {script} cannot be read: {fault_of(error)}") from None
