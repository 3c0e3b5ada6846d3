"""What a project or a script tells uv about versions and builds, as a file of its own."""

import json
import re
import tomllib
from collections.abc import Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Any

from raycrew.venv_manager._spec.credentials import without_credentials
from raycrew.venv_manager._spec.spec import EnvironmentSpec
from raycrew.venv_manager.errors import SpecError

# Settings of `[tool.uv]` that decide versions or builds. They go to uv in a file of their own, so that no
# stray `uv.toml` of a folder above is picked up.
_SETTINGS = frozenset({
    "allow-insecure-host", "build-constraint-dependencies", "config-settings", "config-settings-package",
    "constraint-dependencies", "dependency-metadata", "exclude-dependencies", "exclude-newer",
    "exclude-newer-package", "extra-build-dependencies", "extra-build-variables", "extra-index-url",
    "find-links", "fork-strategy", "index", "index-strategy", "index-url", "keyring-provider", "no-binary",
    "no-binary-package", "no-build", "no-build-isolation", "no-build-isolation-package", "no-build-package",
    "no-index", "no-sources", "override-dependencies", "prerelease", "prerelease-package", "resolution",
})  # fmt: skip
_INLINE = re.compile(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$")


def settings(
    tool_uv: Mapping[str, Any], base: Path, spec: EnvironmentSpec, places: Mapping[str, str] | None = None
) -> str:
    """A `uv.toml` with what a project's `[tool.uv]` says about versions and builds, without credentials.

    Args:
        tool_uv: The project's or the script's settings.
        base: Where relative paths in them start.
        spec: What to build.
        places: Name to URL of what asks for credentials and is not named there: explicit indexes, which serve
            nothing by themselves, tell uv by which name it is given a user and a password.
    """
    chosen = {k: v for k, v in tool_uv.items() if k in _SETTINGS}
    if "find-links" in chosen:
        chosen["find-links"] = [_absolute(text, base) for text in chosen["find-links"]]
    if "index" in chosen:
        chosen["index"] = [{**index, "url": _absolute(index["url"], base)} for index in chosen["index"]]
    if places:
        named = [{"name": name, "url": url, "explicit": True} for name, url in sorted(places.items())]
        chosen["index"] = [*chosen.get("index", ()), *named]
    if spec.wheelhouse:
        for name in ("index", "index-url", "extra-index-url", "find-links"):
            chosen.pop(name, None)
        chosen["no-index"] = True
    lines = (f"{name} = {_toml(value)}\n" for name, value in sorted(chosen.items()))
    return without_credentials("".join(lines))


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
        raise SpecError(f"the inline metadata of {script} cannot be read: {error}") from error
