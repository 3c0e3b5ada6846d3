"""The key of an environment: a digest of everything that decides what is in it, and what tells two apart."""

import hashlib
import json
import platform
import sysconfig
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from raycrew.venv_manager._spec import given
from raycrew.venv_manager._spec.interpreters import interpreter
from raycrew.venv_manager._spec.local import named_requirement
from raycrew.venv_manager._spec.spec import EnvironmentSpec
from raycrew.venv_manager._spec.uv_settings import counted_settings
from raycrew.venv_manager._spec.variables import counted_variables

FORMAT = 3  # of the layout of an environment in the store: a change makes every key new
KEY_LENGTH = 24
# Fields of a spec that count by what lies there, or by the variables that uv is given.
_NOT_AS_WRITTEN = frozenset({
    "path", "python", "requirement_files", "wheelhouse", "environment", "default_index", "indexes",
    "find_links", "offline",
})  # fmt: skip
# Of what is asked for, what counts as it is; the rest counts by the packages that come of it.
_KEPT = ("format", "spec", "files", "variables", "settings", "interpreter", "platform")


def asked(
    spec: EnvironmentSpec,
    environ: Mapping[str, str],
    carried: Mapping[str, Any],
    configured: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Everything that decides the content of an environment before versions are chosen, as plain values.

    Args:
        spec: What it is made from. Paths do not count, what lies there does.
        environ: The whole environment that uv runs in.
        carried: What the driver's environment gives along.
        configured: What the user and the system tell uv.

    Raises:
        SpecError: A file or folder is missing, or a lock is asked for and there is none.
    """
    paths = given.source_paths(spec, environ)
    names = {path: name for name, path in paths.items()}
    named = spec.replace(packages=[named_requirement(text, None, names) for text in spec.packages])
    options = {k: v for k, v in named.to_dict().items() if k not in _NOT_AS_WRITTEN}
    variables = {**environ, **dict(spec.environment)}
    sources = {name: (path, given.fingerprint(path, variables)) for name, path in paths.items()}
    return {
        "format": FORMAT,
        "spec": options,
        "files": given.files(spec, environ, paths),
        "sources": {name: found for name, (_, found) in sources.items()},
        "requires": {name: given.requirements_hash(p, found) for name, (p, found) in sources.items()},
        "wheelhouse": given.wheelhouse(spec),
        "variables": counted_variables(environ, dict(spec.environment)),
        "settings": counted_settings(configured, spec),
        "interpreter": interpreter(spec),
        "platform": _platform(),
        "carried": dict(carried) if spec.carry else {},
    }


def choice_of(asked: Mapping[str, Any]) -> str:
    """The digest of what decides which versions are chosen; the code of local sources does not."""
    carried = {k: v for k, v in asked["carried"].items() if k != "raycrew"}
    return key_of({k: v for k, v in asked.items() if k not in ("sources", "carried")} | {"carried": carried})


def identity(
    asked: Mapping[str, Any], packages: Mapping[str, str], local: Mapping[str, str]
) -> dict[str, Any]:
    """Everything that decides the content of an environment.

    Args:
        asked: What was asked for.
        packages: What was chosen for it: names to versions and hashes, wherever the files lie.
        local: Names to what the wheels hold that local sources are built to, and those carried along.
    """
    kept = {name: asked[name] for name in _KEPT} | {"ray": asked["carried"].get("ray")}
    return kept | {"packages": dict(packages), "local": dict(local)}


def key_of(found: Mapping[str, Any]) -> str:
    """The digest of an identity, short enough for a path."""
    text = json.dumps(found, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]


def explain(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What tells two identities apart, one line for each difference; empty when their keys are the same."""
    a, b = _flat(one), _flat(other)
    lines = []
    for name in sorted({*a, *b}):
        left, right = a.get(name, "absent"), b.get(name, "absent")
        if left != right:
            lines.append(f"{name}: {left} -> {right}")
    return lines


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in values.items():
        label = f"{prefix}{name}"
        if isinstance(value, Mapping):
            found |= _flat(value, f"{label}.")
        else:
            found[label] = value if isinstance(value, str) else json.dumps(value)
    return found


@lru_cache(maxsize=1)
def _platform() -> str:
    return f"{sysconfig.get_platform()}-{'-'.join(platform.libc_ver())}"
