"""Where packages come from: what the spec says, else what uv, else what pip is configured with."""

import configparser
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from raycrew.venv_manager._spec import EnvironmentSpec

# Variables of uv that a user may set and that are handed on. All others would change what is built unseen.
_KEPT = (
    "UV_CACHE_DIR", "UV_CONCURRENT_BUILDS", "UV_CONCURRENT_DOWNLOADS", "UV_CONCURRENT_INSTALLS",
    "UV_EXCLUDE_NEWER", "UV_HTTP_TIMEOUT", "UV_HTTP_RETRIES", "UV_INSECURE_HOST", "UV_KEYRING_PROVIDER",
    "UV_LINK_MODE", "UV_COMPILE_BYTECODE", "UV_OFFLINE", "UV_PYTHON_DOWNLOADS", "UV_PYTHON_INSTALL_DIR",
    "UV_PYTHON_INSTALL_MIRROR", "UV_SYSTEM_CERTS", "UV_NATIVE_TLS", "UV_TORCH_BACKEND", "UV_INDEX_STRATEGY",
)  # fmt: skip
_CREDENTIALS = ("UV_INDEX_",)  # UV_INDEX_<NAME>_USERNAME and _PASSWORD
# Variables of the calling process that lead a build astray.
_DROPPED = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "RUST_LOG")


def pip_settings(environ: Mapping[str, str], prefix: str = sys.prefix) -> dict[str, str]:
    """What pip is configured with: its files from the widest to the narrowest, then its variables.

    uv does not read these. Only the sections `global` and `install` count, as for `pip install`.
    """
    found: dict[str, str] = {}
    for path in _pip_files(environ, prefix):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError, OSError):
            continue  # pip itself will say what is wrong with its file
        for section in ("global", "install"):
            if parser.has_section(section):
                found |= {key.replace("_", "-"): value for key, value in parser.items(section)}
    for name, value in environ.items():
        if name.startswith("PIP_") and value:
            found[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    return found


def _pip_files(environ: Mapping[str, str], prefix: str) -> Iterable[Path]:
    named = environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return
    for folder in reversed((environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)):
        yield Path(folder, "pip", "pip.conf")
    yield Path("/etc/pip.conf")
    if home := environ.get("HOME"):
        yield Path(home, ".pip", "pip.conf")
        yield Path(environ.get("XDG_CONFIG_HOME") or Path(home, ".config"), "pip", "pip.conf")
    yield Path(prefix, "pip.conf")
    if named:
        yield Path(named)


def index_variables(
    spec: EnvironmentSpec, environ: Mapping[str, str], pip: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The variables that tell uv where packages come from, in canonical form: they count in the digest."""
    if spec.wheelhouse:
        return {"UV_FIND_LINKS": spec.wheelhouse}
    pip = pip_settings(environ) if pip is None else pip
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
    return found


def build_environment(spec: EnvironmentSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a uv process: the caller's, without what leads astray, with what the spec says."""
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _DROPPED
        and (
            not name.startswith("UV_")
            or name in _KEPT
            or (name.startswith(_CREDENTIALS) and name != "UV_INDEX_URL")
        )
    }
    kept.pop("UV_INDEX_STRATEGY", None) if spec.wheelhouse else None
    pip = pip_settings(environ)
    if (cert := pip.get("cert")) and "SSL_CERT_FILE" not in kept and Path(cert).is_file():
        kept["SSL_CERT_FILE"] = cert
    kept.setdefault("UV_COMPILE_BYTECODE", "1")
    if spec.offline or environ.get("RAYCREW_VENV_OFFLINE", "").lower() in ("1", "true", "yes"):
        kept["UV_OFFLINE"] = "1"
    return kept | index_variables(spec, environ, pip) | dict(spec.environment)


def without_password(url: str) -> str:
    """URLs in a text without user names and passwords: those are not shown, kept or counted."""
    return re.sub(r"(?<=://)[^/@\s]+@", "", url)


def _words(text: str) -> list[str]:
    """A list as pip (blanks, new lines) or uv (commas) writes it."""
    return text.replace(",", " ").split()
