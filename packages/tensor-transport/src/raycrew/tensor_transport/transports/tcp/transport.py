"""Bytes over TCP, from whoever offers them to whoever has the offer."""

import contextlib
import secrets
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from raycrew.tensor_transport._ray import address_for_others
from raycrew.tensor_transport.protocols import Bytes
from raycrew.tensor_transport.transports._interface import Buffer, Capabilities, Guard, Offer
from raycrew.tensor_transport.transports._pulling import Job, Puller, gone, lost, source_bytes
from raycrew.tensor_transport.transports.tcp.serving import Listener
from raycrew.tensor_transport.transports.tcp.wire import (
    GONE,
    HERE,
    MAX_REQUESTS,
    HangupError,
    Request,
    fill,
    greet,
    packed,
    take,
)

_CONNECT_S = 30.0
_SPLIT_BYTES = 8 << 20
"""Less than this is not worth another connection."""


class _Key(NamedTuple):
    """Where an offer is to be had, and what proves that its bearer may have it."""

    host: str
    port: int
    token: bytes
    name: bytes

    def __repr__(self) -> str:
        """All but the token: this is shown."""
        return f"{self.name.hex()} at {self.host} port {self.port}"


class TcpTransport(Puller):
    """Offers lend memory, which is sent to whoever holds the offer: it carries the address and a token.

    Both ends prove that they know the token without sending it, so that neither a stranger is served nor
    bytes of another server at a reused port are taken. What is sent is not encrypted: keep it to networks
    that you trust.

    Args:
        host: Address to listen on from the first offer on; loopback unless told otherwise. "0.0.0.0" and "::"
            mean all addresses; offers then carry that of this node.
        port: Port, 0 for any free one.
        token: What offers carry; made up unless given.
        advertise: Host name or address for offers, where others know this one by another.
        connections: At most so many at once from one transfer to one owner.
        max_connections: Connections that are served at once; as many may be about to prove that they know the
            token, the oldest of which makes room where there are more.
        idle_s: A peer that neither sends nor takes anything for so long is hung up on.
    """

    name = "tcp"

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str | None = None,
        advertise: str | None = None,
        connections: int = 4,
        max_connections: int = 256,
        idle_s: float = 60.0,
    ) -> None:
        if connections < 1 or max_connections < 1 or idle_s <= 0:
            raise ValueError("connections, max_connections and idle_s must be positive")
        self._host, self._port, self._advertise = host, port, advertise
        self._token = (token or secrets.token_urlsafe(32)).encode()
        self._connections, self._max_connections, self._idle_s = connections, max_connections, idle_s
        self._held: dict[bytes, Bytes] = {}
        self._listener: Listener | None = None
        self._listening = threading.Lock()
        super().__init__()

    @property
    def capabilities(self) -> Capabilities:
        """Whatever a route leads to; the owner's process has to live and to run."""
        return Capabilities(reach="cluster")

    def offer(self, data: Buffer, *, folded: bool = False) -> Offer:
        """See `PullTransport.offer`."""
        self._ready_to_offer()
        raw, name = source_bytes(data), secrets.token_bytes(16)
        port = self._listen()
        self._held[name] = raw
        host = self._advertise or address_for_others(self._host)
        return self._offer(_Key(host, port, self._token, name), raw, folded)

    def withdraw(self, offers: Sequence[Offer]) -> None:
        """See `PullTransport.withdraw`."""
        for offer in offers:
            self._held.pop(offer.key.name, None)

    def _listen(self) -> int:
        with self._listening:
            if self._listener is None:
                self._listener = Listener(
                    self._host,
                    self._port,
                    self._token,
                    self._held.get,
                    max_connections=self._max_connections,
                    idle_s=self._idle_s,
                )
            return self._listener.port

    def _move(self, jobs: Sequence[Job], guard: Guard) -> None:
        lanes = [lane for members in _by_server(jobs) for lane in _lanes(members, self._connections)]
        if len(lanes) <= 1:
            for lane in lanes:
                self._fetch(lane, guard)
            return
        with ThreadPoolExecutor(len(lanes), thread_name_prefix="pull-tcp-lane") as pool:
            moving = [pool.submit(self._fetch, lane, guard) for lane in lanes]
            for moved in moving:
                try:
                    moved.result()
                except BaseException:
                    guard.stop()  # The others end as well, and are waited for.
                    raise

    def _fetch(self, jobs: Sequence[Job], guard: Guard) -> None:
        first = jobs[0].offer
        try:
            with _connected(first, self._idle_s, guard) as connection:
                for start in range(0, len(jobs), MAX_REQUESTS):
                    connection.fetch(jobs[start : start + MAX_REQUESTS])
        except OSError as error:
            guard.check()
            raise lost(first, f"{first.key.host} port {first.key.port} does not answer: {error}") from error

    def _release(self) -> None:
        with self._listening:
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        self._held.clear()

    def _forget(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.let_go()
        self._listening = threading.Lock()
        self._held = {}


class _Connection:
    """A connection to a server that proved to be the one that made the offer."""

    def __init__(self, sock: socket.socket, idle_s: float, guard: Guard) -> None:
        self._sock, self._idle_s, self._guard = sock, idle_s, guard

    def check(self) -> None:
        """Wait no longer than may be."""
        self._guard.check()
        left = self._guard.left_s()
        self._sock.settimeout(self._idle_s if left is None else max(0.001, min(self._idle_s, left)))

    def fetch(self, jobs: Sequence[Job]) -> None:
        """Ask for some regions, and fill their buffers in turn."""
        self.check()
        self._sock.sendall(
            packed([Request(job.offer.key.name, job.region.offset, job.region.size_bytes) for job in jobs])
        )
        for job in jobs:
            self._expect_here(job.offer)
            job.fill(lambda part, _: fill(self._sock, part.data, self.check), self._guard, in_order=True)
            self._expect_here(job.offer)

    def _expect_here(self, offer: Offer) -> None:
        state = take(self._sock, 1, self.check)[0]
        if state != HERE:
            raise gone(offer, "it was withdrawn" if state == GONE else "it is shorter than it says")


@contextlib.contextmanager
def _connected(offer: Offer, idle_s: float, guard: Guard) -> Iterator[_Connection]:
    guard.check()
    left = guard.left_s()
    wait_s = _CONNECT_S if left is None else max(0.001, min(_CONNECT_S, left))
    with socket.create_connection((offer.key.host, offer.key.port), timeout=wait_s) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        guard.on_stop(lambda: _hang_up(sock))
        connection = _Connection(sock, idle_s, guard)
        try:
            greet(sock, offer.key.token, connection.check)
        except HangupError as error:
            raise HangupError(f"{error} (no such offers, too many connections, or another token)") from error
        yield connection


def _hang_up(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _by_server(jobs: Sequence[Job]) -> list[list[Job]]:
    servers: dict[tuple[str, int, bytes], list[Job]] = defaultdict(list)
    for job in jobs:
        servers[job.offer.key[:3]].append(job)
    return list(servers.values())


def _lanes(jobs: Sequence[Job], most: int) -> list[list[Job]]:
    """Jobs in groups of about as many bytes each, one for each connection; large ones first."""
    total = sum(job.region.size_bytes for job in jobs)
    count = max(1, min(most, len(jobs), total // _SPLIT_BYTES))
    lanes: list[list[Job]] = [[] for _ in range(count)]
    loads = [0] * count
    for job in sorted(jobs, key=lambda job: -job.region.size_bytes):
        least = loads.index(min(loads))
        lanes[least].append(job)
        loads[least] += job.region.size_bytes
    return lanes
