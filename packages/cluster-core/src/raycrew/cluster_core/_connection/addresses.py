"""Addresses of clusters: what they look like, and whether anybody is there."""

import os
import re
import socket
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import psutil

from raycrew.cluster_core.errors import ClusterUnreachableError

Places = frozenset[IPv4Address | IPv6Address]

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


def places_of(host: str) -> Places:
    """The addresses that a host's name leads to from here; none where it leads nowhere."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return frozenset()
    return frozenset(_plain(str(address[0])) for *_, address in found)


def own_places() -> Places:
    """The addresses of this machine's interfaces."""
    kinds = (socket.AF_INET, socket.AF_INET6)
    found = (one for interface in psutil.net_if_addrs().values() for one in interface if one.family in kinds)
    return frozenset(_plain(one.address) for one in found)


def is_same(
    address: str,
    known: str,
    places_of: Callable[[str], Places] = places_of,
    own_places: Callable[[], Places] = own_places,
) -> bool:
    """Whether an address, however it is spelled, is that of a cluster whose own address is known.

    A cluster on this machine is meant by the names, interfaces and loopback addresses of the machine, too;
    one that is known by a loopback address by loopback addresses alone, as it listens to nothing else.
    Whoever joins the cluster takes the address that is known: what a name leads to may change.

    Args:
        address: What somebody says.
        known: What the cluster's own processes say.
        places_of: The addresses that a host's name leads to.
        own_places: Those of this machine.
    """
    if address == known or "://" in address:
        return address == known
    (host, port), (known_host, known_port) = split_address(address), split_address(known)
    if port != known_port:
        return False
    asked, there = places_of(host), places_of(known_host)
    if not asked or not there:
        return False
    if asked <= there:
        return True
    own = own_places()
    if not all(_is_loopback(place) or place in own for place in asked | there):
        return False
    return all(map(_is_loopback, asked)) or not any(map(_is_loopback, there))


def _plain(text: str) -> IPv4Address | IPv6Address:
    place = ip_address(text)
    return getattr(place, "ipv4_mapped", None) or place


def _is_loopback(place: IPv4Address | IPv6Address) -> bool:
    return place.is_loopback or place.is_unspecified  # who connects to 0.0.0.0 gets to this machine


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
