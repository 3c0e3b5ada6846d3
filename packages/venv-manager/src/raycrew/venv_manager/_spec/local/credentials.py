"""User names and passwords in URLs: told apart from where a URL leads, never kept with it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

# As `urllib.parse` reads an authority: the user's part ends at the last @ before the path. Schemes
# are short: else each letter of a long word would begin a search through all of it.
_AUTHORITY = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]{0,99})://(?P<user>[^\s/?#\"'<>]*)@")
_URL = re.compile(_AUTHORITY.pattern + r"[^\s\"'<>,;]*")


@dataclass(frozen=True, slots=True)
class Credential:
    """Who asks at a place.

    Attributes:
        url: The place, without user and password.
        username: The user, or a token.
        password: May be empty.
    """

    url: str
    username: str = field(repr=False)
    password: str = field(repr=False)

    @property
    def host(self) -> str:
        """Host and port of the place."""
        return urlsplit(self.url).netloc


def without_credentials(text: str) -> str:
    """A text whose URLs have no user names and passwords; the user of a remote shell stays."""
    return _AUTHORITY.sub(_bare, text)


def _bare(match: re.Match[str]) -> str:
    name = match["user"].partition(":")[0]
    kept = f"{name}@" if match["scheme"].lower().endswith("ssh") else ""
    return f"{match['scheme']}://{kept}"


def credentials_in(text: str) -> Iterator[Credential]:
    """The credentials of all URLs in a text; those of remote shells are keys, and lie elsewhere."""
    for match in _URL.finditer(text):
        if not match["scheme"].lower().endswith("ssh") and match["user"]:
            user = urlsplit(match[0]).netloc.rpartition("@")[0]
            name, _, password = user.partition(":")
            yield Credential(without_credentials(match[0]), unquote(name), unquote(password))
