"""Ports that stay taken between being chosen and being used."""

import contextlib
import logging
import os
import random
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import Self
from weakref import WeakSet

from raycrew.cluster_core._ray import PerProcess
from raycrew.cluster_core.errors import PortsExhaustedError

logger = logging.getLogger(__name__)

_LOWEST, _HIGHEST = 1024, 65535
_AFTER_RAY_WORKERS = 20000  # `ray start` gives its workers 10002 to 19999.
_BEFORE_RAY_WORKERS = 10001
_ROUNDS = 6
_EPHEMERAL_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")


#: All that hold ports in this process, or will.
_held = WeakSet[socket.socket]()
_making = PerProcess(RLock)


def _holding_socket(*kind: int) -> socket.socket:
    """A socket that no process has a part in that is forked from this one."""
    with _making.here:
        one = socket.socket(*kind)
        _held.add(one)
    return one


def _let_go() -> None:
    for one in list(_held):
        one.close()


# Else ports would stay taken after their release, as long as a process lives that was forked meanwhile.
os.register_at_fork(
    before=lambda: _making.here.acquire(),
    after_in_parent=lambda: _making.here.release(),
    after_in_child=_let_go,
)


@dataclass(slots=True)
class PortLease:
    """Ports of this node that no other lease gets, in any process and under any user, until `release()`.

    Each is bound by a socket that does not listen. A server that sets SO_REUSEADDR (torch's TCPStore, gloo,
    most others) can listen on the port while the lease is held; whoever does not is kept out. The lease ends
    with its process at the latest, and a process that is forked from that has no part in it. It can't be
    pickled: lease where the port will be used.

    Attributes:
        ports: The leased ports in ascending order.
        host: Address that the ports are held on; None is every interface.
    """

    ports: tuple[int, ...]
    host: str | None = None
    _sockets: list[socket.socket] = field(default_factory=list, repr=False)

    @property
    def port(self) -> int:
        """The first port."""
        return self.ports[0]

    def release(self) -> None:
        """Let others have the ports; idempotent."""
        while self._sockets:
            self._sockets.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def ephemeral_range(source: Path = _EPHEMERAL_FILE) -> tuple[int, int]:
    """Ports that the system gives to outgoing connections, first and last."""
    try:
        low, high = source.read_text().split()
    except OSError:
        return 32768, 60999  # Linux's own default, where /proc is not mounted.
    return int(low), int(high)


def default_port_range(ephemeral: tuple[int, int] | None = None) -> tuple[int, int]:
    """The ports to lease from, first and last: below the ephemeral floor and clear of Ray's own workers.

    Where the ephemeral range starts too low for that, what lies above it is used.

    Raises:
        PortsExhaustedError: The ephemeral range covers everything from 1024 up.
    """
    floor, ceiling = ephemeral or ephemeral_range()
    candidates = (
        (_AFTER_RAY_WORKERS, floor - 1),
        (_LOWEST, min(floor - 1, _BEFORE_RAY_WORKERS)),
        (ceiling + 1, _HIGHEST),
    )
    for low, high in candidates:
        if high - low >= 256:
            return low, high
    raise PortsExhaustedError(
        f"the ephemeral range {floor}-{ceiling} leaves no ports to lease; narrow it with "
        "`sysctl net.ipv4.ip_local_port_range` or pass port_range",
        (floor, ceiling),
    )


def check_port_range(port_range: tuple[int, int]) -> tuple[int, int]:
    """Return (first, last) if they are a range of unprivileged ports, both ends included.

    Raises:
        TypeError: Not two integers.
        ValueError: Reversed, or outside 1024 to 65535.
    """
    pair = tuple(port_range) if isinstance(port_range, Iterable) else ()
    if len(pair) != 2 or any(isinstance(end, bool) or not isinstance(end, int) for end in pair):
        raise TypeError(f"port_range is a pair of integers (first, last), not {port_range!r}")
    low, high = pair
    if low < _LOWEST or high > _HIGHEST:
        raise ValueError(f"port_range {low}-{high} reaches outside {_LOWEST}-{_HIGHEST}")
    if low > high:
        raise ValueError(f"port_range {low}-{high} is reversed")
    return low, high


def lease_ports(
    count: int = 1,
    *,
    port_range: tuple[int, int] | None = None,
    consecutive: bool = False,
    host: str | None = None,
) -> PortLease:
    """Take ports of this node, in this process, and hold them.

    Args:
        count: How many.
        port_range: First and last port to choose from; by default what `default_port_range()` says.
        consecutive: Whether the ports must follow one another.
        host: Address to hold the ports on, IPv4 or IPv6; by default every interface of both.

    Raises:
        TypeError: `count` or `port_range` is not of integers.
        ValueError: `count` is below one or larger than the range, the range is bad, or the host is not local.
        PortsExhaustedError: Too few ports of the range are free.

    Examples:
        >>> with lease_ports(2, consecutive=True) as lease:
        ...     lease.ports[1] - lease.ports[0]
        1
    """
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"count is an integer, not {count!r}")
    low, high = check_port_range(port_range) if port_range is not None else default_port_range()
    if not 1 <= count <= high - low + 1:
        raise ValueError(
            f"count {count} is outside 1 to {high - low + 1}, the size of the range {low}-{high}"
        )
    family, address = _resolve(host)
    search = _block if consecutive else _scattered
    for attempt in range(_ROUNDS):
        holder = _Holder(family, address, reuse=attempt > 0)
        held = search(holder, count, low, high)
        if held is not None:
            sockets = [one for pair in held.values() for one in pair]
            return PortLease(tuple(sorted(held)), host, sockets)
        if attempt:
            if not holder.contended:
                break
            logger.debug("ports %d-%d are contended, attempt %d", low, high, attempt + 1)
            time.sleep(random.uniform(0.005, 0.03))
    what = f"{count} consecutive ports are" if consecutive else f"{count} ports are"
    what = "port is" if count == 1 else what
    raise PortsExhaustedError(
        f"no {what} free in {low}-{high} on {host or 'this node'}; release some, or widen port_range",
        (low, high),
    )


_Pair = tuple[socket.socket, socket.socket]


@dataclass(slots=True)
class _Holder:
    """Takes single ports, and remembers whether another lease was in the way.

    With `reuse` it also takes ports that only old connections in TIME_WAIT still name.
    """

    family: int
    address: str
    reuse: bool
    contended: bool = False

    def hold(self, port: int) -> _Pair | None:
        lock = _holding_socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0raycrew-port-{port}")  # Abstract: lives in the network namespace, as the port does.
        except OSError:
            lock.close()
            self.contended = True
            return None
        try:
            return lock, self._bound(port)
        except OSError:
            lock.close()
            return None

    def _bound(self, port: int) -> socket.socket:
        one = _holding_socket(self.family, socket.SOCK_STREAM)
        try:
            if self.family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(self.address != "::"))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(self.reuse))
            one.bind((self.address, port))
            # Set after an exclusive bind: nobody was there before, and a server may come after.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError:
            one.close()
            raise
        return one


def _scattered(holder: _Holder, count: int, low: int, high: int) -> dict[int, _Pair] | None:
    """Any free ports from a random start: a port just released is not the next one given out."""
    size = high - low + 1
    start = random.randrange(size)
    return _collect(holder.hold, (low + (start + step) % size for step in range(size)), count)


def _block(holder: _Holder, count: int, low: int, high: int) -> dict[int, _Pair] | None:
    first = low
    while first + count - 1 <= high:
        held: dict[int, _Pair] = {}
        for port in range(first, first + count):
            pair = holder.hold(port)
            if pair is None:
                _close(held)
                first = port + 1
                break
            held[port] = pair
        else:
            return held
    return None


def _collect(
    hold: Callable[[int], _Pair | None], ports: Iterator[int], count: int
) -> dict[int, _Pair] | None:
    held: dict[int, _Pair] = {}
    for port in ports:
        pair = hold(port)
        if pair is not None:
            held[port] = pair
        if len(held) == count:
            return held
    _close(held)
    return None


def _close(held: dict[int, _Pair]) -> None:
    for pair in held.values():
        for one in pair:
            one.close()


def _resolve(host: str | None) -> tuple[int, str]:
    """Family and address to bind, checked by binding a port that the system picks."""
    if host is None:
        # Bound, never listening.
        everywhere = "0.0.0.0"  # nosec B104
        return (socket.AF_INET6, "::") if _has_ipv6() else (socket.AF_INET, everywhere)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind((address[0], 0))
    except OSError as error:
        raise ValueError(f"host {host!r} is no address of this node: {error}") from error
    return family, str(address[0])


def _has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        probe.bind(("::", 0))
        return True
    return False
