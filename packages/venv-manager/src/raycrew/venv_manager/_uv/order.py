"""Which index serves what on this machine: in the order in which uv asks them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raycrew.venv_manager._spec import EnvironmentSpec, read_toml, without_credentials
from raycrew.venv_manager._uv.access import credentials_of
from raycrew.venv_manager._uv.configuration import configuration_files, configured
from raycrew.venv_manager._uv.indexes import index_variables

ASKED = "all packages"
LAST = "what no other has (default)"
BY_NAME = "only packages that name it (explicit)"
BESIDE = "files beside the indexes (find-links)"
PLACES = frozenset({"index", "index-url", "extra-index-url", "find-links"})
"""The settings of uv that say so."""

_PYPI = "https://pypi.org/simple"
_PIP = "pip's configuration"
_VARIABLES = {"UV_INDEX": "UV_EXTRA_INDEX_URL", "UV_DEFAULT_INDEX": "UV_INDEX_URL", "UV_FIND_LINKS": ""}


@dataclass(frozen=True, slots=True)
class Serving:
    """A place that packages come from.

    Attributes:
        name: What it is called; often nothing.
        url: The place, without user and password.
        serves: Which packages are looked for there.
        said_by: The variable or the file that names it.
        credentials: Where this machine has a user or a password for it; empty where nowhere.
    """

    name: str
    url: str
    serves: str
    said_by: str
    credentials: str

    def __str__(self) -> str:
        where = " ".join(word for word in (self.name, self.url) if word)
        known = f"; credentials: {self.credentials or 'none'}" if self.url.startswith("http") else ""
        return f"{where}: {self.serves}; said by {self.said_by}{known}"


def serving(environ: Mapping[str, str]) -> list[Serving]:
    """Where uv looks for the packages of a spec that names no places itself, in its order.

    Raises:
        SpecError: A file of the configuration cannot be read.
    """
    told = [*_by_variables(environ), *_by_files(environ)]
    if configured(environ).get("no-index"):
        told = [row for row in told if row[0] == BESIDE]
    else:
        told.append((LAST, "", _PYPI, "uv itself"))
    chosen = [row for row in told if row[0] != LAST] + [row for row in told if row[0] == LAST][:1]
    order = (ASKED, LAST, BESIDE, BY_NAME)
    found: dict[str, Serving] = {}
    for serves, name, url, said_by in sorted(chosen, key=lambda row: order.index(row[0])):
        known = credentials_of(name, url, environ)
        row = Serving(name, without_credentials(url), serves, said_by, known)
        found.setdefault(row.name or row.url, row)
    return list(found.values())


_Told = tuple[str, str, str, str]
"""(what it serves, name, URL, who says so)."""


def _by_variables(environ: Mapping[str, str]) -> Iterator[_Told]:
    """Variables count more than files; pip's configuration is handed to uv in them."""
    given = index_variables(EnvironmentSpec.requirements(["any"]), environ)
    for variable, serves in (("UV_INDEX", ASKED), ("UV_DEFAULT_INDEX", LAST), ("UV_FIND_LINKS", BESIDE)):
        said = {
            without_credentials(word): (own, word)
            for own in (_VARIABLES[variable], variable)
            for word in environ.get(own, "").replace(",", " ").split()
        }
        for word in given.get(variable, "").replace(",", " ").split():
            by, whole = said.get(word, (_PIP, word))
            name, named, url = whole.partition("=")
            if not named or "/" in name:
                name, url = "", whole
            yield serves, name, url, by


def _by_files(environ: Mapping[str, str]) -> Iterator[_Told]:
    """As uv joins files: each of its lists whole before the next one, and within it the user's first."""
    files = [(path, read_toml(path)) for path in configuration_files(environ)]
    tables: list[tuple[Path, str, Mapping[str, Any]]] = [
        *((path, f"{path}, its table pip", data.get("pip", {})) for path, data in files),
        *((path, str(path), data) for path, data in files),
    ]
    for _, by, table in tables:
        for index in table.get("index", ()):
            serves = LAST if index.get("default") else BY_NAME if index.get("explicit") else ASKED
            yield serves, index.get("name", ""), index.get("url", ""), by
    for _, by, table in tables:
        yield from ((ASKED, "", url, by) for url in table.get("extra-index-url", ()))
    for _, by, table in tables:
        yield from ((LAST, "", url, by) for url in [table.get("index-url")] if url)
    for path, by, table in tables:
        for place in table.get("find-links", ()):
            yield BESIDE, "", place if "://" in place else str(path.parent / place), by
