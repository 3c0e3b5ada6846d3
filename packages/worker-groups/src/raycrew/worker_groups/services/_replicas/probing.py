"""Whether a server answers: one question, one deadline, nothing kept."""

import socket
import time
from collections.abc import Mapping
from contextlib import suppress

_STATUS_BYTES = 4096


def is_ready(host: str, port: int, path: str | None, headers: Mapping[str, str], timeout_s: float) -> bool:
    """Whether a server answers a path with 2xx; without a path, whether it accepts connections."""
    deadline = time.monotonic() + timeout_s
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            if path is None:
                return True
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            connection.sendall(_request(host, port, path, headers))
            return _status(connection, deadline) // 100 == 2
    except (OSError, ValueError):
        return False


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


def _status(connection: socket.socket, deadline: float) -> int:
    """The number in the first line of an answer.

    Raises:
        ValueError: There is none.
        OSError: It does not come in time.
    """
    heard = b""
    while b"\n" not in heard and len(heard) < _STATUS_BYTES:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        piece = connection.recv(_STATUS_BYTES)
        if not piece:
            break
        heard += piece
        if time.monotonic() >= deadline:
            raise TimeoutError("the answer trickles")
    version, _, rest = heard.partition(b"\n")[0].partition(b" ")
    if not version.startswith(b"HTTP/"):
        raise ValueError("no answer of HTTP")
    return int(rest[:3])
