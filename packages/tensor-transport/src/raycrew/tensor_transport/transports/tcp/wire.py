"""The bytes that a TCP transport speaks: a mutual proof of the token, requests, and counted answers.

The server sends a nonce of 16 bytes. The client answers with a nonce of its own and the HMAC-SHA256 of both
under the token; the server with the other one, so that each knows that the other has the token, which itself
is never sent. Then the client sends batches: a count, and for each region a key, an offset and a size. For
each the server answers with a state; if it is `HERE`, with the bytes, and the state once more, as it is after
the last byte was sent.
"""

import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

NONCE_BYTES = 16
PROOF_BYTES = 32
HERE, GONE, WRONG_SIZE = 1, 2, 3
MAX_REQUESTS = 4096
_REQUEST = struct.Struct("<16sQQ")
_COUNT = struct.Struct("<I")


class Request(NamedTuple):
    """A region that is asked for."""

    key: bytes
    offset: int
    size_bytes: int


class HangupError(ConnectionError):
    """The other side ended the connection, or does not speak as agreed."""


def proof(token: bytes, side: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """What only somebody with the token can say of both nonces."""
    return hmac.digest(token, b"raycrew-tcp-1:" + side + server_nonce + client_nonce, hashlib.sha256)


def greet(sock: socket.socket, token: bytes, check: Callable[[], None]) -> None:
    """The client's side of the mutual proof."""
    theirs, mine = take(sock, NONCE_BYTES, check), secrets.token_bytes(NONCE_BYTES)
    sock.sendall(mine + proof(token, b"client", theirs, mine))
    if not hmac.compare_digest(take(sock, PROOF_BYTES, check), proof(token, b"server", theirs, mine)):
        raise HangupError("another server is at this address now")


def welcome(sock: socket.socket, token: bytes, let_in: Callable[[], bool]) -> bool:
    """The server's side of the mutual proof; whether the client has the token.

    Raises:
        HangupError: It has, and `let_in` says that there is no room for it.
    """
    mine = secrets.token_bytes(NONCE_BYTES)
    sock.sendall(mine)
    said = take(sock, NONCE_BYTES + PROOF_BYTES)
    theirs, shown = said[:NONCE_BYTES], said[NONCE_BYTES:]
    if not hmac.compare_digest(shown, proof(token, b"client", mine, theirs)):
        return False
    if not let_in():
        raise HangupError("too many connections")
    sock.sendall(proof(token, b"server", mine, theirs))
    return True


def packed(requests: Sequence[Request]) -> bytes:
    """A batch of requests."""
    return _COUNT.pack(len(requests)) + b"".join(_REQUEST.pack(*request) for request in requests)


def next_batch(sock: socket.socket) -> list[Request]:
    """The next batch of requests; empty where the client has none any more.

    Raises:
        HangupError: It asks for more at once than is agreed, or stops in the midst.
    """
    first = sock.recv(1)
    if not first:
        return []
    (count,) = _COUNT.unpack(first + take(sock, _COUNT.size - 1))
    if count > MAX_REQUESTS:
        raise HangupError(f"{count} requests at once")
    raw = take(sock, count * _REQUEST.size)
    return [Request(*fields) for fields in _REQUEST.iter_unpack(raw)]


def take(sock: socket.socket, size: int, check: Callable[[], None] | None = None) -> bytes:
    """So many bytes, not less."""
    raw = bytearray(size)
    fill(sock, memoryview(raw), check)
    return bytes(raw)


def fill(sock: socket.socket, target: memoryview, check: Callable[[], None] | None = None) -> None:
    """Fill a buffer; `check` is called before each wait, and sets the time to wait, or raises.

    Raises:
        HangupError: The connection ended before.
        TimeoutError: Nothing came within the time of the socket.
    """
    done = 0
    while done < len(target):
        if check is not None:
            check()
        got = sock.recv_into(target[done:])
        if not got:
            raise HangupError(f"the connection ended after {done} of {len(target)} bytes")
        done += got
