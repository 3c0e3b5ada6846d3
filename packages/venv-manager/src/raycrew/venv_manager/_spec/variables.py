"""The variables that uv is given, and which of them count in the identity of an environment."""

import re
from collections.abc import Mapping
from pathlib import Path

from raycrew.venv_manager._spec.local import file_hash, without_credentials

# These say how files come to their places, how long that may take and who asks for them, not which they are.
# Every other variable of uv counts, those that a later uv will have included.
_HARMLESS = frozenset({
    "UV_CACHE_DIR", "UV_COMPILE_BYTECODE", "UV_COMPILE_BYTECODE_TIMEOUT", "UV_CREDENTIALS_DIR",
    "UV_GITHUB_TOKEN", "UV_HIDE_BUILD_OUTPUT", "UV_INSECURE_HOST", "UV_KEYRING_PROVIDER", "UV_LINK_MODE",
    "UV_LOCK_TIMEOUT",
    "UV_LOG_CONTEXT", "UV_NATIVE_TLS", "UV_NO_CACHE", "UV_NO_HF_TOKEN", "UV_NO_INSTALLER_METADATA",
    "UV_NO_PROGRESS", "UV_NO_WRAP", "UV_OFFLINE", "UV_PYTHON_BIN_DIR", "UV_PYTHON_CACHE_DIR",
    "UV_PYTHON_DOWNLOADS", "UV_PYTHON_INSTALL_BIN", "UV_PYTHON_INSTALL_DIR", "UV_PYTHON_INSTALL_MIRROR",
    "UV_REQUEST_TIMEOUT", "UV_STACK_SIZE", "UV_SYSTEM_CERTS",
})  # fmt: skip
_HARMLESS_FAMILIES = ("UV_CONCURRENT_", "UV_HTTP_")
FILE_VARIABLES = frozenset({"UV_BUILD_CONSTRAINT", "UV_CONSTRAINT", "UV_EXCLUDE", "UV_OVERRIDE"})


# Names that say that the value is a secret: in no key, in no file, on no screen.
_SECRET = re.compile(
    r".*(TOKENS?|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?|CREDS|JWT|BEARER)"
    r"|(.*_)?PAT|.*(API|ACCESS|SECRET|PRIVATE|AUTH|ACCOUNT|SIGNING|ENCRYPTION|SSH|LICENSE)_?KEYS?(_ID)?",
    re.IGNORECASE,
)
# Names that end like those, and say how many pieces of text a model takes, or which of them has a meaning.
_OF_TEXT = re.compile(
    r"(.*_)?(MAX|MIN|NUM|N|TOTAL|BATCHED|SPECIAL|STOP)_(.*_)?TOKENS"
    r"|(.*_)?(PAD|PADDING|EOS|BOS|UNK|SEP|CLS|MASK|STOP)_TOKEN",
    re.IGNORECASE,
)


def is_credential(name: str) -> bool:
    """Whether a variable holds a secret, by its name: a user or a password of an index, a token, a key."""
    of_text = _OF_TEXT.fullmatch(name) is not None
    return is_of_index(name) or (_SECRET.fullmatch(name) is not None and not of_text)


def is_of_index(name: str) -> bool:
    """Whether a variable gives uv a user name or a password of an index."""
    return name.startswith("UV_INDEX_") and name.endswith(("_USERNAME", "_PASSWORD"))


def counted_variables(environ: Mapping[str, str], declared: Mapping[str, str]) -> dict[str, str]:
    """What counts of the environment that uv runs in: its own variables, and those that a spec declares.

    Raises:
        SpecError: A file that a variable names cannot be read.
    """
    names = (name for name in environ if name.startswith("UV_") or name in declared)
    return {name: _value(name, environ[name]) for name in sorted(names) if counts(name)}


def counts(name: str) -> bool:
    """Whether a variable of the environment of uv decides what comes out."""
    harmless = name in _HARMLESS or name.startswith(_HARMLESS_FAMILIES)
    return not (harmless or is_credential(name))


def _value(name: str, value: str) -> str:
    if name in FILE_VARIABLES:
        return " ".join(file_hash(Path(path).absolute()) for path in value.split())
    return without_credentials(value)
