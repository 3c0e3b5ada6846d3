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
_SAID_ANEW = frozenset({b"host", b"content-length", b"expect"})


def is_idempotent(method: str, headers: Headers) -> bool:
    """Whether a request may be sent twice: by its method, or as a header marks it."""
    return method in IDEMPOTENT or any(name.lower() == b"idempotency-key" for name, _ in headers)


def content_length(headers: Headers) -> int | None:
    """How long a body is said to be."""
    return next((int(value) for name, value in headers if name.lower() == b"content-length"), None)


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


def to_client(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The headers of an answer that goes back."""
    return _kept(headers, frozenset())


def _kept(headers: Headers, besides: Iterable[bytes]) -> list[tuple[bytes, bytes]]:
    named = {
        name.strip().lower()
        for key, value in headers
        if key.lower() == b"connection"
        for name in value.split(b",")
    }
    left_out = _OF_A_HOP | named | frozenset(besides)
    return [(name, value) for name, value in headers if name.lower() not in left_out]
