"""Which headers go on, to a server and back to its client, and what they say of a request; pure."""

from collections.abc import Iterable, Mapping, Sequence

Headers = Sequence[tuple[bytes, bytes]]

#: Methods that may be sent twice.
IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})

# Of one connection, or said anew for the next one.
_OF_A_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
_PLACES = frozenset({b"location", b"content-location"})
_SAID_ANEW = frozenset({b"host", b"content-length", b"expect"})


def is_idempotent(method: str, headers: Headers) -> bool:
    """Whether a request may be sent twice: by its method, or as a header marks it."""
    return method in IDEMPOTENT or any(name.lower() == b"idempotency-key" for name, _ in headers)


def content_length(headers: Headers) -> int | None:
    """How long a body is said to be."""
    return next((int(value) for name, value in headers if name.lower() == b"content-length"), None)


def says_not_run(status: int, headers: Headers) -> bool:
    """Whether a server has turned a request away, rather than run it."""
    told = {name.lower(): value for name, value in headers}
    return status == 503 and told.get(b"x-raycrew-outcome") == b"surely-not-run"


def has_two_lengths(headers: Headers) -> bool:
    """Whether a body has a length and comes in chunks, so that its end is not the same for everybody."""
    return {b"content-length", b"transfer-encoding"} <= {name.lower() for name, _ in headers}


def is_web_socket(headers: Headers) -> bool:
    """Whether a request is to become a web socket."""
    return any(name.lower() == b"upgrade" and b"websocket" in value.lower() for name, value in headers)


def to_server(
    headers: Headers,
    host: str,
    credentials: Mapping[str, str],
    length: int | None,
    *,
    is_authorized_here: bool,
) -> list[tuple[bytes, bytes]]:
    """The headers of a request that goes on.

    Args:
        headers: Those of the client.
        host: Host and port of the server.
        credentials: What the server wants to be told.
        length: How long the body is; None if that is not known.
        is_authorized_here: Whether the client's authorization was for this side alone.
    """
    hidden = {b"authorization"} if is_authorized_here or credentials else set()
    kept = [(name, value) for name, value in _kept(headers, _SAID_ANEW) if name.lower() not in hidden]
    framing = (b"transfer-encoding", b"chunked") if length is None else (b"content-length", b"%d" % length)
    own = [(name.encode(), value.encode("latin-1")) for name, value in credentials.items()]
    return [(b"host", host.encode()), *kept, *own, framing, (b"connection", b"close")]


def to_client(headers: Headers, host: str) -> list[tuple[bytes, bytes]]:
    """The headers of an answer that goes back.

    Args:
        headers: Those of the server.
        host: Its host and port: clients who are sent there ask here.
    """
    is_chunked = any(name.lower() == b"transfer-encoding" for name, _ in headers)
    kept = _kept(headers, {b"content-length"} if is_chunked else ())
    origin = f"http://{host}".encode()
    return [(name, _path(value, origin) if name.lower() in _PLACES else value) for name, value in kept]


def _path(value: bytes, origin: bytes) -> bytes:
    """What is left of a URL of an origin; any other as it is."""
    rest = value.removeprefix(origin)
    if rest == value or rest[:1] not in (b"", b"/", b"?", b"#"):
        return value
    return rest if rest.startswith(b"/") else b"/" + rest


def _kept(headers: Headers, besides: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
    named = {
        name.strip().lower()
        for key, value in headers
        if key.lower() == b"connection"
        for name in value.split(b",")
    }
    left_out = _OF_A_HOP | named | frozenset(besides)
    return [(name, value) for name, value in headers if name.lower() not in left_out]
