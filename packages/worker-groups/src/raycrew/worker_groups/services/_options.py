"""What a service is to be: one value, checked where it is made, and the commands that come of it; pure."""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike, fspath
from typing import Any, Self

#: How many characters a token has at least.
TOKEN_LENGTH = 16
#: Variables that tell a server where it is to serve.
HOST_VARIABLE, PORTS_VARIABLE = "RAYCREW_SERVICE_HOST", "RAYCREW_SERVICE_PORTS"

_PLACEHOLDER = re.compile(r"(?<!\{)\{([a-z_]+\d*)\}(?!\})")
_APP = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """The options of a service's constructor, where their defaults are; see `Service`.

    Raises:
        TypeError: An option is of a wrong kind.
        ValueError: It is out of range, or contradicts another.
    """

    server: str | Sequence[str]
    ports: int
    replicas: int
    ready: str | None
    ready_is_open: bool
    name: str
    token_variable: str | None
    host: str | None
    cwd: str | PathLike[str] | None
    environment: str
    max_restarts: int
    ready_timeout_s: float
    probe_interval_s: float
    silent_s: float
    grace_s: float
    max_connections: int

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> Self:
        """The options among a constructor's arguments."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    def __post_init__(self) -> None:
        _check_server(self.server)
        for name in ("ports", "replicas", "max_connections"):
            check_number(name, getattr(self, name), 1, whole=True)
        check_number("max_restarts", self.max_restarts, 0, whole=True)
        for name in ("ready_timeout_s", "probe_interval_s", "silent_s"):
            check_number(name, getattr(self, name), 1e-3)
        check_number("grace_s", self.grace_s, 0)
        for name in ("name", "environment"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} is a string, not {getattr(self, name)!r}")
        for name in ("ready", "host"):
            if not isinstance(getattr(self, name), str | None):
                raise TypeError(f"{name} is a string or None, not {getattr(self, name)!r}")
        _check_path(self.ready)
        self._check_open()
        _check_variable(self.token_variable)
        if self.cwd is not None and not isinstance(self.cwd, str | PathLike):
            raise TypeError(f"cwd is a folder, not {self.cwd!r}")
        if not self.is_app:
            self.words("host", "address", range(1, self.ports + 1), 0)

    def _check_open(self) -> None:
        if not isinstance(self.ready_is_open, bool):
            raise TypeError(f"ready_is_open is True or False, not {self.ready_is_open!r}")
        if self.ready_is_open and (self.ready is None or not self.is_app):
            raise ValueError("ready_is_open= is for the path `ready` of an application, and there is none")

    @property
    def is_app(self) -> bool:
        """Whether it is an ASGI application, rather than a command."""
        return isinstance(self.server, str)

    @property
    def shown(self) -> str:
        """What is served, in short."""
        return self.server if isinstance(self.server, str) else self.server[0]

    @property
    def folder(self) -> str | None:
        """The working directory of servers; None for that of their workers."""
        return None if self.cwd is None else fspath(self.cwd)

    def words(self, host: str, address: str, ports: Sequence[int], rank: int) -> list[str]:
        """The command of a server, with its placeholders filled in.

        Args:
            host: Address to bind to.
            address: Address that others know it by.
            ports: Its ports.
            rank: Number of the replica.

        Raises:
            ValueError: There is no such placeholder.
        """
        known = {"host": host, "address": address, "port": str(ports[0]), "rank": str(rank)}
        known |= {f"port{i}": str(port) for i, port in enumerate(ports)}

        def value(found: re.Match[str]) -> str:
            if found[1] not in known:
                why = "no secret belongs into a command line; " if "token" in found[1] else ""
                names = ", ".join(f"{{{name}}}" for name in known)
                raise ValueError(f"a command can't have {found[0]}: {why}there are {names}")
            return known[found[1]]

        return [_PLACEHOLDER.sub(value, word) for word in self.server]


def check_token(token: str | None, options: ServiceOptions) -> None:
    """Check a token, and that it can get to whoever has to ask for it; what it is stays out of errors.

    Raises:
        TypeError: It is no string.
        ValueError: It is too short, can't be in a header, or the command does not say how it gets it.
    """
    if token is None:
        if options.token_variable is not None:
            raise ValueError("token_variable= is for services with a token, and this one has token=None")
        return
    if not options.is_app and options.token_variable is None:
        raise ValueError(
            "a command checks its token itself: say which variable it reads it from "
            "(token_variable='VLLM_API_KEY', say), or that it is open to whoever reaches it (token=None)"
        )


def made_token(token: str | None) -> str | None:
    """A token as it was given, or one that is made up for "auto".

    Raises:
        TypeError: It is no string.
        ValueError: It is too short, or can't be in a header.
    """
    if token == "auto":  # a word, not a secret # nosec B105
        return secrets.token_urlsafe(32)
    if token is not None:
        check_token_text(token)
    return token


def check_token_text(token: object) -> None:
    """Check that something can be a token.

    Raises:
        TypeError: It is no string.
        ValueError: It is too short, or can't be in a header.
    """
    if not isinstance(token, str):
        raise TypeError(f"a token is a string, 'auto' or None, not of type {type(token).__name__}")
    if len(token) < TOKEN_LENGTH:
        raise ValueError(f"a token has at least {TOKEN_LENGTH} characters; 'auto' makes one up")
    check_header_text(token)


def check_header_text(token: str) -> None:
    """Check that a token can be in a header.

    Raises:
        ValueError: It can't.
    """
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("a token has printable characters of ASCII alone, without spaces")


def _check_server(server: object) -> None:
    if isinstance(server, str):
        if not _APP.fullmatch(server):
            raise ValueError(
                f"{server!r} is neither an application such as 'package.app:create' nor a command, "
                "which is a sequence of words such as ['vllm', 'serve', '--port', '{port}']"
            )
        return
    if not isinstance(server, Sequence) or not server or not all(isinstance(w, str) and w for w in server):
        raise TypeError(f"a command is a sequence of words, and none is empty; not {server!r}")
    if any("\0" in word for word in server):
        raise ValueError("a command has a null character, which none can have")
    if not any("{port" in word for word in server[1:]):
        raise ValueError(
            "the command does not say which port its server is to take: a word has to have {port}, "
            "as in ['serve', '--port', '{port}'] or, for a variable, ['env', 'PORT={port}', 'serve']"
        )


def _check_path(ready: str | None) -> None:
    if ready is None:
        return
    if not ready.startswith("/") or not ready.isascii() or not ready.isprintable() or set(" #") & set(ready):
        raise ValueError(f"ready is a path such as '/health', or None for a port that accepts, not {ready!r}")


def _check_variable(name: object) -> None:
    if name is None:
        return
    if not isinstance(name, str):
        raise TypeError(f"token_variable is the name of a variable, not {name!r}")
    if not _VARIABLE.fullmatch(name):
        raise ValueError(f"token_variable is the name of a variable, which {name!r} is not")


def check_number(option: str, value: object, least: float, *, whole: bool = False) -> None:
    """Check a number.

    Raises:
        TypeError: It is none.
        ValueError: It is too small, or infinite.
    """
    kinds = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"{option} is a {'whole ' if whole else ''}number, not {value!r}")
    if not least <= value < float("inf"):
        raise ValueError(f"{option} is {value!r}; it is at least {least:g}, and finite")
