"""What tells whose a request is: a header, a cookie, or a field of its JSON; pure."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

Headers = Iterable[tuple[bytes, bytes]]

_KINDS = ("header", "cookie", "json")


@dataclass(frozen=True, slots=True)
class Key:
    """Where the key of a request is.

    Attributes:
        kind: "header", "cookie" or "json".
        name: Its name; of JSON, the names of fields on the way to it, with dots between them.
    """

    kind: str
    name: str

    @classmethod
    def parsed(cls, text: str) -> Self:
        """The key that a text such as "header:x-session", "cookie:sid" or "json:user.id" means.

        Raises:
            TypeError: It is no text.
            ValueError: It is none of these.
        """
        if not isinstance(text, str):
            raise TypeError(f"a key is named by a string such as 'header:x-session', not by {text!r}")
        kind, _, name = text.partition(":")
        if kind not in _KINDS or not name or not name.isascii() or not name.isprintable():
            raise ValueError(f"a key is 'header:NAME', 'cookie:NAME' or 'json:FIELD.FIELD', not {text!r}")
        return cls(kind, name.lower() if kind == "header" else name)

    @property
    def is_in_body(self) -> bool:
        """Whether the body has to be there for it."""
        return self.kind == "json"

    def of(self, headers: Headers, body: bytes) -> str | None:
        """The key of a request; None where it has none."""
        if self.kind == "json":
            return _field(body, self.name.split("."))
        if self.kind == "header":
            return next(_values(headers, self.name), None) or None
        return _cookie(_values(headers, "cookie"), self.name)


def _values(headers: Headers, name: str) -> Iterator[str]:
    wanted = name.encode()
    return (value.decode("latin-1") for key, value in headers if key.lower() == wanted)


def _cookie(texts: Iterable[str], name: str) -> str | None:
    """The first cookie of a name, whatever else there is: the standard library drops all for an odd one."""
    for text in texts:
        for pair in text.split(";"):
            own, equals, value = pair.partition("=")
            if equals and own.strip() == name:
                return value.strip().strip('"') or None
    return None


def _field(body: bytes, names: list[str]) -> str | None:
    try:
        value: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    is_key = isinstance(value, str | int) and not isinstance(value, bool)
    return (str(value) or None) if is_key else None
