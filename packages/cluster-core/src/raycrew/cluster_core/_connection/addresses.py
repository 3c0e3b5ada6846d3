"""Addresses of clusters: what they look like, and whether anybody is there."""

import os
import re
import socket
from pathlib import Path

from raycrew.cluster_core.errors import ClusterUnreachableError

_SHAPE = re.compile(
    r"(?P<scheme>ray://)?(?P<host>\[[0-9a-fA-F:.%\w]+\]|[^:/\s\[\]]+):(?P<port>\d{1,5})(?P<query>\?.*)?"
)


def split_address(address: str) -> tuple[str, int]:
    """Host (without brackets) and port of `host:port` or `ray://host:port`.

    Raises:
        ValueError: It is neither.
    """
    match = _SHAPE.fullmatch(address)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise ValueError(f"address {address!r} is not host:port, ray://host:port, 'auto' or 'local'")
    return match["host"].strip("[]"), int(match["port"])


def check_address(address: str | os.PathLike[str] | None) -> None:
    """Refuse what can't be an address, a path above all.

    Raises:
        TypeError: It is neither a string nor a path.
        ValueError: It is malformed, or a path.
    """
    if address is None or address in ("auto", "local"):
        return
    text = os.fspath(address)
    if text is not address or _is_path(text):
        raise ValueError(f"address {text!r} is a path; pass a folder for logs by name, log_dir={text!r}")
    split_address(text)


def _is_path(text: str) -> bool:
    return "://" not in text and ("/" in text or text.startswith((".", "~")) or Path(text).is_dir())


def check_reachable(address: str, timeout_s: float) -> None:
    """Open and close a TCP connection: Ray itself retries for minutes where nobody answers.

    Raises:
        ClusterUnreachableError: It can't be opened.
    """
    host, port = split_address(address)
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError as error:
        raise ClusterUnreachableError(
            f"no Ray cluster answers at {address}: {error}. Is it running, and does a firewall allow {port}?",
            address,
        ) from error
