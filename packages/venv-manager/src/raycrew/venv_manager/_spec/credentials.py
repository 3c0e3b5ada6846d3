"""User names and passwords in URLs: told apart from where a URL leads, never kept with it."""

import re

# As `urllib.parse` reads an authority: the user's part ends at the last @ before the path.
_AUTHORITY = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]*)://(?P<user>[^\s/?#\"'<>]*)@")


def without_credentials(text: str) -> str:
    """A text whose URLs have no user names and passwords; the user of a remote shell stays."""
    return _AUTHORITY.sub(_bare, text)


def _bare(match: re.Match[str]) -> str:
    name, colon, _ = match["user"].partition(":")
    if match["scheme"].lower().endswith("ssh") and not colon:
        return match[0]
    kept = f"{name}@" if match["scheme"].lower().endswith("ssh") else ""
    return f"{match['scheme']}://{kept}"
