"""Where one process puts buckets, and gets them from: over whatever route it has joined."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from raycrew.tensor_transport import _ray
from raycrew.tensor_transport._bytes import Closing, private_copy, remake_in_child, tensor_over
from raycrew.tensor_transport.errors import (
    GroupError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
)
from raycrew.tensor_transport.process_groups import CollectiveGroup, join_group
from raycrew.tensor_transport.protocols import Bytes, ByteStore
from raycrew.tensor_transport.transports import (
    CudaIpcTransport,
    ProcessVmTransport,
    PullTransport,
    SharedMemoryTransport,
    TcpTransport,
    Transfer,
    member_facts,
)
from raycrew.tensor_transport.weights._routing.route import Place, Route, Ticket
from raycrew.tensor_transport.weights._update import (
    CPU,
    as_store,
    device_of,
    fresh_bucket,
    get_tensor,
    put_tensor,
    reserve,
    settle,
    shares_memory,
)

_MADE: Mapping[str, Callable[[], PullTransport | None]] = {
    "object_store": lambda: None,
    "shared_memory": SharedMemoryTransport,
    "process_vm": ProcessVmTransport,
    "tcp": lambda: TcpTransport(_ray.node_address() or "127.0.0.1"),
    "cuda_ipc": CudaIpcTransport,
}
_REMEMBERED = 100
"""So many routes that were joined are remembered: nobody reads alone what was to be broadcast to it."""


class RouteStore(Closing):
    """The store of a publisher or a receiver whose transport `WeightRoute` chooses, for all of them at once.

    It goes where a store goes: `WeightPublisher(RouteStore(), …)`, `WeightReceiver(…, store=RouteStore())`.
    Where a collective was chosen, the buckets of an update by `sync_weights(route=…)` are broadcast to its
    receivers, and kept for those who come late, who roll back, or whose process is made again: these read
    them from there, alone. In an update nobody does: if one member of the route cannot go on, nobody can.
    What is kept in memory that all of a node map is lent where that is the route's transport: a receiver's
    `borrow=True` spares the copy, and its bytes stay as they are for as long as it holds them, whatever is
    published, rolled back or joined meanwhile. All else that `get` gives is memory of its own, as is what
    those read alone who come late to a broadcast.

    Over a route of device "cuda" buckets are packed, sent and handed to `load` on the device that is the
    current one of the thread that joins, and on the CPU where a process has not joined it yet. What a
    "shadow" keeps is on the device, too.

    Args:
        stores: Transports to be used in place of those that are made, by their names; closed by whoever made
            them.

    Raises:
        ValueError: No transport that keeps buckets has this name.

    Attributes:
        gives_own_memory: Whether all that `get` gave is nobody else's. Once it lent something it is False for
            good: whoever asks after a `get` must not hear of a route that was joined between.
    """

    ticket_type = Ticket

    def __init__(self, stores: Mapping[str, PullTransport] | None = None) -> None:
        self._given = dict(stores or {})
        if unknown := sorted(self._given.keys() - _MADE.keys()):
            raise ValueError(f"no transport {unknown[0]!r} keeps buckets; stores= takes {', '.join(_MADE)}")
        self._made: dict[str, PullTransport | None] = {}
        self._stores: dict[tuple[str, torch.device], ByteStore] = {}
        self.gives_own_memory = True
        self._device = CPU
        self._route: Route | None = None
        self._groups: tuple[CollectiveGroup, ...] = ()
        self._turns: dict[str, list[int]] = {}
        self._sends, self._deadline = "", math.inf
        self._sent: deque[Transfer] = deque(maxlen=2)
        self._closed = False
        self._lock = threading.RLock()
        remake_in_child(self)

    def after_fork(self) -> None:
        """A forked child has joined no route: its parent is the member."""
        self._lock = threading.RLock()
        self._groups, self._route, self._device = (), None, CPU
        self._turns, self._sends = {}, ""
        self._sent.clear()

    @property
    def key(self) -> str:
        """The route that this process has joined, and that works; "" where there is none."""
        is_whole = all(group.available() is None for group in self._groups)
        return self._route.key if self._route is not None and is_whole else ""

    @property
    def device(self) -> torch.device:
        """Where what is put next is best packed, and what is got comes to."""
        return self._device

    @property
    def shares_memory(self) -> bool:
        """Whether all of the route map what is put now: it goes by the transport that has it."""
        route = self._route
        if route is None or route.transport != route.kept_in:
            return False
        store = self._kept_in(route.kept_in)
        return shares_memory(store) and device_of(store) == self._device

    def explain(self) -> str:
        """What was chosen for all, and why: the same text in all of them."""
        return "no route is joined" if self._route is None else self._route.explanation

    def join(self, route: Route | None) -> Place:
        """Say where this process is; with a route, join that first, in place of the one before.

        Raises:
            GroupError: Not all members joined, or one died meanwhile.
            TransportClosedError: This store is closed.
        """
        self._check_open()
        if route is not None:
            device = _own_device(route)
            self.abandon()
            joined: list[CollectiveGroup] = []
            with ExitStack() as failed:
                for invitation in route.invitations:
                    joined.append(join_group(invitation, timeout_s=route.timeout_s))
                    failed.callback(joined[-1].close)
                others = self._take(route, joined, device)
                failed.pop_all()
            for group in others:
                group.close()
        return Place(member_facts(), self.key)

    def _take(
        self, route: Route, groups: Sequence[CollectiveGroup], device: torch.device
    ) -> tuple[CollectiveGroup, ...]:
        """Go over a route from now on; the groups of one that was joined meanwhile."""
        with self._lock:
            self._check_open()
            others, self._groups = self._groups, tuple(groups)
            self._route, self._device = route, device
            self._turns[route.key] = [0] * len(groups)
            for key in list(self._turns)[:-_REMEMBERED]:
                del self._turns[key]
        return others

    def begin(self, key: str, timeout_s: float | None = None) -> bool:
        """A version begins, which receivers of a route take while it is put; "" where nobody does.

        Args:
            key: The route.
            timeout_s: Until when the receivers have to have all of it.

        Returns:
            Whether its buckets are broadcast, and not only kept.

        Raises:
            GroupError: This process has not joined that route.
        """
        if key and key != self.key:
            raise GroupError("this publisher has not joined the route of the update: its method has to")
        with self._lock:
            self._sends = key if self._groups else ""
            self._deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
            return bool(self._sends)

    def put(self, data: Bytes) -> Ticket:
        """Keep a copy of `data`, and broadcast it where receivers wait for it."""
        return self.put_tensor(tensor_over(data, torch.uint8, data.shape))

    def put_tensor(self, data: torch.Tensor) -> Ticket:
        """As `put`: uint8, of one dimension."""
        name, store = self._keeper()
        ticket = Ticket(name, put_tensor(store, data), data.numel())
        if not self._sends:
            return ticket
        try:
            return self._broadcast(ticket, self._to_send(store, ticket, data))
        except BaseException:
            store.release(ticket.kept)
            raise

    def reserve_tensor(self, size_bytes: int) -> tuple[Ticket, torch.Tensor] | None:
        """Where a bucket is kept, to be packed there at once; None where it is broadcast, too."""
        name, store = self._keeper()
        found = None if self._sends or self._device != CPU else reserve(store, size_bytes)
        return None if found is None else (Ticket(name, found[0], size_bytes), found[1])

    def _to_send(self, store: ByteStore, ticket: Ticket, data: torch.Tensor) -> torch.Tensor:
        """The bytes where the group moves them, as they stay until they are sent: what is kept, or a copy."""
        device = self._moved_on()
        if device == CPU:
            return get_tensor(store, ticket.kept)
        copy = private_copy(data.to(device))
        settle(device)  # Whoever packs the next bucket, on a stream of its own, may write over these.
        return copy

    def get(self, ticket: Ticket, timeout_s: float | None = None) -> Bytes:
        """The bytes: received as they are broadcast, or read from where they are kept."""
        found = self.get_tensor(ticket, timeout_s).cpu().numpy()
        if not self.gives_own_memory:
            found.flags.writeable = False
        return found

    def get_tensor(self, ticket: Ticket, timeout_s: float | None = None) -> torch.Tensor:
        """As `get`: uint8, of one dimension."""
        with self._lock:
            transfer, data = self._received(ticket, timeout_s)
        if transfer is not None:
            transfer.wait()
            return data.to(self._device)
        store = self._kept_in(ticket.kept_in)
        found = get_tensor(store, ticket.kept, timeout_s)
        if found.device != self._device:
            return found.to(self._device)
        if getattr(store, "gives_own_memory", False):
            return found
        if not self._lends(ticket):
            return private_copy(found)
        self.gives_own_memory = False
        return found

    def release(self, ticket: Ticket) -> None:
        """Keep the bytes no longer."""
        self._kept_in(ticket.kept_in).release(ticket.kept)

    def abandon(self) -> None:
        """Leave the route: what is under way in it fails for all its members at once."""
        with self._lock:
            groups, self._groups, self._route = self._groups, (), None
        for group in groups:
            group.close()
        self._sent.clear()

    def close(self) -> None:
        """Leave the route, and close the transports that were made here; idempotent."""
        with self._lock:  # Nothing is joined or made any more.
            self._closed = True
        self.abandon()
        while self._made:
            if (made := self._made.popitem()[1]) is not None:
                made.close()

    def _broadcast(self, ticket: Ticket, data: torch.Tensor) -> Ticket:
        """Begin to send a bucket to all receivers of the route."""
        with self._lock:
            route, turns = self._route, self._turns.get(self._sends)
            if route is None or route.key != self._sends or turns is None:
                raise GroupError("the route of this update was given up")
            self._check_sent()
            left_s = None if self._deadline == math.inf else self._deadline - time.monotonic()
            _check_time(left_s)
            turns[0] += 1
            sent = replace(ticket, key=route.key, group=route.number, turn=turns[0])
            transfer = self._groups[0].send([data], manifest=sent.manifest, timeout_s=left_s)
            self._sent.append(transfer)
        return sent

    def _received(self, ticket: Ticket, timeout_s: float | None) -> tuple[Transfer | None, torch.Tensor]:
        """The broadcast of a bucket, begun; None for one that this process does not take part in."""
        nothing, turns = fresh_bucket(0, self._device), self._turns.get(ticket.key)
        if turns is None or ticket.turn <= turns[ticket.group]:
            return None, nothing
        if ticket.key != self.key or ticket.turn != turns[ticket.group] + 1:
            raise GroupError(f"this process takes no part any more in {ticket.manifest}")
        _check_time(timeout_s)
        turns[ticket.group] += 1
        data = fresh_bucket(ticket.size_bytes, self._moved_on(ticket.group))
        group = self._groups[ticket.group]
        return group.receive([data], manifest=ticket.manifest, timeout_s=timeout_s), data

    def _check_sent(self) -> None:
        """Raise what became of a bucket before."""
        for transfer in self._sent:
            if transfer.done() and (error := transfer.exception()) is not None:
                raise error

    def _moved_on(self, group: int = 0) -> torch.device:
        """Where a group moves bytes."""
        return self._device if "cuda" in self._groups[group].capabilities.devices else CPU

    def _lends(self, ticket: Ticket) -> bool:
        """Whether a bucket lies where all of the route read it, and not only those who come late."""
        route = self._route
        return route is not None and route.transport == ticket.kept_in

    def _keeper(self) -> tuple[str, ByteStore]:
        """What keeps buckets that are put now."""
        name = _default() if self._route is None else self._route.kept_in
        return name, self._kept_in(name)

    def _kept_in(self, name: str) -> ByteStore:
        with self._lock:
            place = (name, self._device)
            if place not in self._stores:
                self._stores[place] = as_store(self._given.get(name) or self._make(name), self._device)
            return self._stores[place]

    def _check_open(self) -> None:
        if self._closed:
            raise TransportClosedError("this RouteStore is closed")

    def _make(self, name: str) -> PullTransport | None:
        self._check_open()
        if name not in _MADE:
            raise TransportError(f"{name} keeps no buckets; {', '.join(_MADE)} do")
        if name not in self._made:
            self._made[name] = _MADE[name]()
        return self._made[name]


def _own_device(route: Route) -> torch.device:
    """Where a route has bytes in this process, as the thread that joins it sees it."""
    return torch.device("cuda", torch.cuda.current_device()) if route.device == "cuda" else CPU


def _check_time(left_s: float | None) -> None:
    """Refuse a bucket that cannot be in time, before it counts as one that this process takes part in."""
    if left_s is not None and left_s <= 0:
        raise TransportTimeoutError("the time of the update is over")


def _default() -> str:
    """Where buckets are kept that no route was chosen for."""
    return "object_store" if _ray.is_connected() else "shared_memory"
