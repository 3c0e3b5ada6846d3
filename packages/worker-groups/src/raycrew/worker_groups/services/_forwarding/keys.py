"""What tells whose a request is: a header, a cookie, or a field of its JSON; pure."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
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
            return _value(headers, self.name)
        return _cookie(_value(headers, "cookie") or "", self.name)


def _value(headers: Headers, name: str) -> str | None:
    wanted = name.encode()
    return next((value.decode("latin-1") for key, value in headers if key.lower() == wanted), None) or None


def _cookie(text: str, name: str) -> str | None:
    try:
        found = SimpleCookie(text).get(name)
    except CookieError:
        return None
    return found.value or None if found is not None else None


def _field(body: bytes, names: list[str]) -> str | None:
    try:
        value: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    is_key = isinstance(value, str | int) and not isinstance(value, bool)
    return (str(value) or None) if is_key else None
