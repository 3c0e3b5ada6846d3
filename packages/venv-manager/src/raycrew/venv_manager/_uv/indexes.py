"""Where packages come from: what the spec says, else what uv, else what pip is configured with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raycrew.venv_manager._spec import FILE_VARIABLES, EnvironmentSpec, is_credential, without_credentials
from raycrew.venv_manager._uv.configuration import configured, names_indexes
from raycrew.venv_manager._uv.pip_settings import pip_settings

# Variables of uv that mean another project, another interpreter or another command. All others reach it.
_MISLEADING = frozenset({
    "UV_BREAK_SYSTEM_PACKAGES", "UV_CONFIG_FILE", "UV_CUSTOM_COMPILE_COMMAND", "UV_DEV", "UV_ENV_FILE",
    "UV_FROZEN", "UV_ISOLATED", "UV_LOCKED", "UV_NO_CONFIG", "UV_NO_DEFAULT_GROUPS", "UV_NO_DEV",
    "UV_NO_EDITABLE",
    "UV_NO_ENV_FILE", "UV_NO_GROUP", "UV_NO_PROJECT", "UV_NO_SYNC", "UV_NO_SYSTEM_CONFIG", "UV_PROJECT",
    "UV_PROJECT_ENVIRONMENT", "UV_PYTHON", "UV_SHOW_RESOLUTION", "UV_SYSTEM_PYTHON", "UV_WORKING_DIR",
    "UV_WORKING_DIRECTORY",
})  # fmt: skip
_MISLEADING_FAMILIES = (
    "UV_INIT_", "UV_INTERNAL_", "UV_NO_INSTALL_", "UV_ONLY_INSTALL_", "UV_PUBLISH_", "UV_RUN_", "UV_TOOL_",
    "UV_VENV_",
)  # fmt: skip
# Which the variables of `index_variables` replace.
_REPLACED = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")
# Variables of the calling process that lead a build astray.
_DROPPED = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "RUST_LOG")


def index_variables(
    spec: EnvironmentSpec, environ: Mapping[str, str], pip: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The variables that tell uv where packages come from, without user names and passwords."""
    if spec.wheelhouse:
        return {"UV_FIND_LINKS": spec.wheelhouse}
    pip = pip_settings(environ) if pip is None else pip
    said = configured(environ)
    pip = {k: v for k, v in pip.items() if not _said_to_uv(k, said)}
    find_links = [*spec.find_links, *_words(environ.get("UV_FIND_LINKS") or pip.get("find-links", ""))]
    indexes = [
        *spec.indexes,
        *_words(environ.get("UV_INDEX", "")),
        *_words(environ.get("UV_EXTRA_INDEX_URL", "")),
    ]
    found = {}
    from_pip = [] if indexes else _words(pip.get("extra-index-url", ""))
    default = spec.default_index or environ.get("UV_DEFAULT_INDEX") or environ.get("UV_INDEX_URL")
    if default or pip.get("index-url"):
        found["UV_DEFAULT_INDEX"] = default or pip["index-url"]
    if indexes or from_pip:
        found["UV_INDEX"] = " ".join(dict.fromkeys([*indexes, *from_pip]))
    if from_pip and "UV_INDEX_STRATEGY" not in environ:
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # what pip does with several indexes
    if find_links:
        found["UV_FIND_LINKS"] = ",".join(dict.fromkeys(find_links))
    return {name: without_credentials(value) for name, value in found.items()}


def build_environment(spec: EnvironmentSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a uv process: the caller's, without what leads astray, with what the spec says."""
    dropped = _MISLEADING.union(_DROPPED, _REPLACED)
    kept = {k: v for k, v in environ.items() if k not in dropped and not k.startswith(_MISLEADING_FAMILIES)}
    for name in FILE_VARIABLES & kept.keys():  # uv runs in folders of ours
        kept[name] = " ".join(str(Path(path).absolute()) for path in kept[name].split())
    kept.pop("UV_INDEX_STRATEGY", None) if spec.wheelhouse else None
    pip = pip_settings(environ)
    if (cert := pip.get("cert")) and "SSL_CERT_FILE" not in kept and Path(cert).is_file():
        kept["SSL_CERT_FILE"] = cert
    kept.setdefault("UV_COMPILE_BYTECODE", "1")
    if spec.offline or environ.get("RAYCREW_VENV_OFFLINE", "").lower() in ("1", "true", "yes"):
        kept["UV_OFFLINE"] = "1"
    declared = {k: without_credentials(v) for k, v in spec.environment if not is_credential(k)}
    return kept | index_variables(spec, environ, pip) | declared


def _said_to_uv(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether the user's or the system's `uv.toml` says what this setting of pip would say."""
    if name == "find-links":
        return "find-links" in settings
    return name in ("index-url", "extra-index-url") and names_indexes(settings)


def _words(text: str) -> list[str]:
    """A list as pip (blanks, new lines) or uv (commas) writes it."""
    return text.replace(",", " ").split()
