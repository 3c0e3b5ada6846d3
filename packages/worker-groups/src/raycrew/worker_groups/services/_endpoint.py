"""Where a server is reached, and how its replicas are: values for whoever asks."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from raycrew.worker_groups.services._options import check_header_text

_ORIGIN = re.compile(r"http://([\w.-]+|\[[\w.:%-]+\])(:\d+)?")

Status = Literal["ready", "restarting", "failed", "stopped", "lost"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server answers; it may be pickled, as an argument of workers, and shows its token to nobody.

    Attributes:
        url: Scheme, host and port, as in "http://127.0.0.1:20017".
        token: What the server wants to be told, or None; `headers` has it as requests do.
        rank: Number of the replica.
        ports: All ports of the server, that of `url` first.

    Raises:
        ValueError: The URL is of another form, or the token can be in no header.

    Examples:
        >>> endpoint = Endpoint("http://127.0.0.1:20017", "a-token-that-nobody-knows")
        >>> endpoint
        Endpoint(url='http://127.0.0.1:20017', rank=0, ports=())
        >>> endpoint.headers
        {'Authorization': 'Bearer a-token-that-nobody-knows'}
    """

    url: str
    token: str | None = field(default=None, repr=False)
    rank: int = 0
    ports: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not _is_origin(self.url):
            raise ValueError(f"an endpoint's url is http://host:port, and nothing besides; not {self.url!r}")
        if self.token is not None:
            check_header_text(self.token)

    def __str__(self) -> str:
        return self.url

    @property
    def host(self) -> str:
        """Host name or address."""
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        """Port of the URL."""
        return urlsplit(self.url).port or 80

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers that a request needs; none without a token."""
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """How a replica is.

    Attributes:
        rank: Its number.
        status: "ready"; "restarting"; "failed" (no restarts are left, of its server or of its worker);
            "stopped"; or "lost" (its worker has died, and is to be replaced).
        endpoint: Where it answers, while it is ready.
        restarts: How often its server was started anew, within this worker.
        reason: Why it is not ready, or was started anew the last time.
        pid: Process id of its server on its node, if there is one.
        exit_code: What its last server ended with, if it did.
        log_tail: Last lines of output of a server that ended.
    """

    rank: int
    status: Status
    endpoint: Endpoint | None = None
    restarts: int = 0
    reason: str = ""
    pid: int | None = None
    exit_code: int | None = None
    log_tail: str = field(default="", repr=False)


def _is_origin(url: str) -> bool:
    try:
        return _ORIGIN.fullmatch(url) is not None and urlsplit(url).port != 0
    except ValueError:
        return False


def url_of(address: str, port: int) -> str:
    """The URL of a server; an address of IPv6 gets its brackets."""
    return f"http://{f'[{address}]' if ':' in address else address}:{port}"
