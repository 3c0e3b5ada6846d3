"""Whether a server answers: one question, one deadline, nothing kept."""

import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal

#: "full": it lives, and has no place for another connection.
Answer = Literal["good", "full", "bad"]

_HEAD_BYTES = 4096
_TURNED_AWAY = b"x-raycrew-outcome: surely-not-run"


def answer_of(host: str, port: int, path: str | None, headers: Mapping[str, str], timeout_s: float) -> Answer:
    """How a server answers a path: 2xx is good; without a path it is enough that it accepts connections."""
    deadline = time.monotonic() + timeout_s
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            if path is None:
                return "good"
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            with suppress(BrokenPipeError, ConnectionResetError):  # who is turned away is told before
                connection.sendall(_request(host, port, path, headers))
            return _told(connection, deadline)
    except (OSError, ValueError):
        return "bad"


def is_taken(host: str, port: int) -> bool:
    """Whether anybody accepts connections there."""
    with suppress(OSError), socket.create_connection((host, port), timeout=1.0):
        return True
    return False


def _request(host: str, port: int, path: str, headers: Mapping[str, str]) -> bytes:
    named = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    all_headers = {"Host": named, "Connection": "close", "Accept": "*/*", **headers}
    lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in all_headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _told(connection: socket.socket, deadline: float) -> Answer:
    """What the head of an answer says.

    Raises:
        ValueError: There is none.
        OSError: It does not come in time.
    """
    heard = _heard(connection, b"\n", b"", deadline)
    version, _, rest = heard.partition(b"\n")[0].partition(b" ")
    if not version.startswith(b"HTTP/"):
        raise ValueError("no answer of HTTP")
    status = int(rest[:3])
    if status == 503 and _TURNED_AWAY in _heard(connection, b"\r\n\r\n", heard, deadline).lower():
        return "full"
    return "good" if status // 100 == 2 else "bad"


def _heard(connection: socket.socket, end: bytes, heard: bytes, deadline: float) -> bytes:
    """What is heard until some end, after what was heard already."""
    while end not in heard and len(heard) < _HEAD_BYTES:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        piece = connection.recv(_HEAD_BYTES)
        if not piece:
            break
        heard += piece
        if time.monotonic() >= deadline:
            raise TimeoutError("the answer trickles")
    return heard
