"""What asks for credentials, and the credentials: kept apart, and given to uv by an index's name."""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from raycrew.venv_manager._spec import (
    Credential,
    EnvironmentSpec,
    credentials_in,
    is_credential,
    is_of_index,
    project_folder,
    requirement_files,
    requirement_lines,
    without_credentials,
    workspace_root,
)
from raycrew.venv_manager._uv.pip_settings import pip_settings
from raycrew.venv_manager.errors import CredentialsError

_SOURCES = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")
_FROM_PIP = ("index-url", "extra-index-url", "find-links")
_TELLING = 4  # Characters of a credential that is looked for in texts; shorter ones are in every word.
_TELLING_LINE = 8  # Of a line of one that has several, where shorter ones are often plain words.
_NAMED = re.compile(r"(?<![^\s,])(?P<name>[A-Za-z0-9_.-]+)=(?P<url>[a-z]+://\S+)")


@dataclass(frozen=True, slots=True)
class Access:
    """Which places ask for credentials.

    Attributes:
        urls: Name to URL, for places that nothing else names: indexes that serve nothing by themselves.
        names: Name to URL of all of them: what another machine needs credentials for; secret variables that
            the spec declares have no URL.
        secrets: The variables that give uv the credentials, for this process and its children only.
    """

    urls: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


def access_of(spec: EnvironmentSpec, environ: Mapping[str, str], tool_uv: Mapping[str, Any]) -> Access:
    """What of all that a spec leads uv to asks for credentials.

    Args:
        spec: What to build.
        environ: Environment of the calling process.
        tool_uv: What the project or the script, and the configuration, say to uv.

    Raises:
        SpecError: A file of the spec cannot be read.
    """
    sources = [value for name, value in spec.environment if name in _SOURCES]
    texts = [*_of_machine(environ), *sources, *_of_spec(spec, environ)]
    named = {m["name"]: m["url"] for text in texts for m in _NAMED.finditer(text)}
    named |= {i["name"]: i["url"] for i in tool_uv.get("index", ()) if "name" in i and "url" in i}
    theirs = {name: next(credentials_in(url), None) for name, url in named.items()}
    by_name = {name: credential for name, credential in theirs.items() if credential is not None}
    apart = [c for text in (*texts, str(tool_uv)) for c in credentials_in(text)]
    ours = _places([c for c in apart if c not in by_name.values() and not c.url.startswith("git+")])
    secrets = dict(_variables({**by_name, **ours})) | _for_git(apart, environ)
    declared = {k: v for k, v in spec.environment if is_credential(k) or _is_told_whole(k, v)}
    urls = {name: c.url for name, c in ours.items()}
    names = {name: "" for name in declared if is_credential(name) and not is_of_index(name)}
    return Access(urls, urls | {name: c.url for name, c in by_name.items()} | names, secrets | declared)


def _is_told_whole(name: str, value: str) -> bool:
    """Whether a variable names a place with its user, and is none of uv's, which is told those apart."""
    return name not in _SOURCES and next(credentials_in(value), None) is not None


def access_here(environ: Mapping[str, str]) -> dict[str, str]:
    """The credentials that this machine's own environment and pip's configuration hold."""
    ours = _places([c for text in _of_machine(environ) for c in credentials_in(text)])
    return dict(_variables(ours))


def hiding(environ: Mapping[str, str]) -> Callable[[str], str]:
    """What takes the credentials of an environment out of a text: of URLs, and wherever they are printed.

    Of one with several lines each is taken out by itself, as what is printed comes line by line.
    """
    with_password = {name.removesuffix("_PASSWORD") for name in environ if name.endswith("_PASSWORD")}
    values = {
        value
        for name, value in environ.items()
        if is_credential(name) and name.removesuffix("_USERNAME") not in with_password
    }
    lines = {line.strip() for value in values for line in value.splitlines()}
    told = {v for v in values if len(v) >= _TELLING} | {n for n in lines if len(n) >= _TELLING_LINE}
    spelled = {form for text in told for form in (text, quote(text, safe=""), quote(text))}
    if not spelled:
        return without_credentials
    found = re.compile("|".join(re.escape(value) for value in sorted(spelled, key=len, reverse=True)))
    return lambda text: found.sub("***", without_credentials(text))


def _of_machine(environ: Mapping[str, str]) -> Iterator[str]:
    yield from (environ[name] for name in _SOURCES if name in environ)
    pip = pip_settings(environ)
    yield from (pip[name] for name in _FROM_PIP if name in pip)


def _of_spec(spec: EnvironmentSpec, environ: Mapping[str, str]) -> Iterator[str]:
    yield from (spec.default_index or "", *spec.indexes, *spec.find_links, *spec.packages)
    for name in spec.requirement_files:
        for file in requirement_files(Path(name), environ):
            yield from requirement_lines(file, environ)
    if spec.kind in ("script", "pylock"):
        yield Path(spec.path).read_text(encoding="utf-8")
    if spec.kind == "project":
        folder = project_folder(spec)
        for path in {folder, workspace_root(folder)}:
            yield (path / "pyproject.toml").read_text(encoding="utf-8")


def _places(credentials: Iterable[Credential]) -> dict[str, Credential]:
    """One name for each host; where a host knows several users, one for each folder."""
    by_host: dict[str, set[tuple[str, str]]] = {}
    found = dict.fromkeys(credentials)
    for c in found:
        by_host.setdefault(c.host, set()).add((c.username, c.password))
    places = {}
    for c in found:
        parts = urlsplit(c.url)
        path = parts.path.rpartition("/")[0] if len(by_host[c.host]) > 1 else ""
        place = Credential(f"{parts.scheme}://{c.host}{path}/", c.username, c.password)
        places[re.sub(r"[^a-z0-9]+", "-", f"{c.host}{path}".lower()).strip("-")] = place
    return places


def _variables(credentials: Mapping[str, Credential]) -> Iterator[tuple[str, str]]:
    for name, c in credentials.items():
        yield _variable(name, "USERNAME"), c.username
        if c.password:  # else uv looks for it in its own store, netrc and the keyring
            yield _variable(name, "PASSWORD"), c.password


def _variable(name: str, what: str) -> str:
    return f"UV_INDEX_{re.sub(r'[^A-Za-z0-9]', '_', name).upper()}_{what}"


def _for_git(credentials: Iterable[Credential], environ: Mapping[str, str]) -> dict[str, str]:
    """Git asks nobody but itself: it is told to put the user back into a URL that has none."""
    count, found = int(environ.get("GIT_CONFIG_COUNT", "0")), {}
    for c in dict.fromkeys(c for c in credentials if c.url.startswith("git+")):
        scheme = urlsplit(c.url).scheme.removeprefix("git+")
        user = f"{quote(c.username, safe='')}:{quote(c.password, safe='')}".rstrip(":")
        found[f"GIT_CONFIG_KEY_{count}"] = f"url.{scheme}://{user}@{c.host}/.insteadOf"
        found[f"GIT_CONFIG_VALUE_{count}"] = f"{scheme}://{c.host}/"
        count += 1
    return found | {"GIT_CONFIG_COUNT": str(count)} if found else {}


def need_credentials(names: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """See that this machine has a credential for each place that asks for one, and each secret variable.

    Raises:
        CredentialsError: It lacks one; the message names the index and the variables.
    """
    if lacking := [name for name, url in names.items() if not url and name not in environ]:
        raise CredentialsError(
            f"the environment is built with {', '.join(lacking)}, and this machine does not have it: secrets "
            "are not sent, set it there"
        )
    if _asks_keyring(environ):
        return
    for name, url in ((name, url) for name, url in names.items() if url):
        if not credentials_of(name, url, environ):
            variables = [_variable(name, what) for what in ("USERNAME", "PASSWORD")]
            host = urlsplit(url).hostname or ""
            raise CredentialsError(
                f"the index {name} ({url}) asks for credentials, and this machine has none: set "
                f"{' and '.join(variables)} there, or put {host} into its ~/.netrc",
                index=name,
            )


def credentials_of(name: str, url: str, environ: Mapping[str, str]) -> str:
    """Where this machine has a user or a password for an index; empty where nowhere. Tells neither."""
    if next(credentials_in(url), None):
        return "in its URL"
    variables = [_variable(name, what) for what in ("USERNAME", "PASSWORD")] if name else []
    if there := [variable for variable in variables if variable in environ]:
        return " and ".join(there)
    if (urlsplit(url).hostname or "") in _known_hosts(environ):
        return "netrc, or uv's own store"
    return "the keyring is asked" if url.startswith("http") and _asks_keyring(environ) else ""


def _asks_keyring(environ: Mapping[str, str]) -> bool:
    return environ.get("UV_KEYRING_PROVIDER", "disabled") != "disabled"


def _known_hosts(environ: Mapping[str, str]) -> set[str]:
    """Hosts of the user's netrc file, and of what `uv auth login` keeps."""
    home = environ.get("HOME") or str(Path.home())
    hosts: set[str] = set()
    with contextlib.suppress(
        OSError, UnicodeDecodeError, NetrcParseError
    ):  # uv, too, does without a file that cannot be read
        hosts |= netrc(environ.get("NETRC") or Path(home, ".netrc")).hosts.keys()
    folder = environ.get("UV_CREDENTIALS_DIR") or Path(
        environ.get("XDG_DATA_HOME") or Path(home, ".local", "share"), "uv", "credentials"
    )
    kept = Path(folder, "credentials.toml")
    if os.access(kept, os.R_OK):
        hosts |= set(re.findall(r"://([^/:\"@\s]+)", kept.read_text(encoding="utf-8", errors="replace")))
    return hosts
