"""How the buckets of updates get from a trainer to its generators: decided once, for all of them."""

import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from raycrew.tensor_transport._bytes import Belonging
from raycrew.tensor_transport.errors import TransportClosedError, TransportError
from raycrew.tensor_transport.process_groups import Backend, GroupHost, Invitation
from raycrew.tensor_transport.transports import Choice, choose_transport
from raycrew.tensor_transport.weights._routing import Device, Place, Route
from raycrew.tensor_transport.weights._syncing.calling import Calls, PlainCalls, ThreadedCalls
from raycrew.tensor_transport.weights._syncing.session import Member
from raycrew.tensor_transport.weights._syncing.turns import Turn, Turns

_KEEPERS = ("object_store", "shared_memory", "process_vm", "tcp")
"""What may keep the buckets that a collective broadcasts, the preferred ones first."""
_COLLECTIVES = ("gloo", "nccl")
_ON_CPU = ("shared_memory", "gloo", "object_store", "tcp")
_USABLE: Mapping[str, tuple[str, ...]] = {"cpu": _ON_CPU, "cuda": ("nccl", "cuda_ipc", *_ON_CPU)}
"""What may be asked for, by where the bytes are."""


class WeightRoute(Belonging):
    """Chooses one transport for a trainer and its generators, and has all of them use it; of the driver.

    `sync_weights(route=…)` calls a method on all ranks that hands what it is given to `RouteStore.join`, and
    returns what that returns; trainer ranks that publish nothing return None. From what all say of
    themselves one transport is chosen for all. For gloo and NCCL each publishing rank and all generators
    become a process group of our own, which spans their worker groups; a member that was made again, or a
    broken group, has all of them join the next generation before the next update begins.

    Args:
        transport: "auto" for the fastest that all can use (on one machine "shared_memory" for bytes of the
            CPU), or the names to choose from, in order: "shared_memory", "gloo", "object_store", "tcp"; with
            `device="cuda"` also "nccl", for which each member needs a GPU of its own, and "cuda_ipc", for
            which all see the GPUs of all, on one machine. That keeps versions in the publishers' device
            memory; all others keep them in that of the machines.
        method: The method's name.
        name: Of the groups, for people.
        address: Where members reach this process, as for `GroupHost`.
        timeout_s: Deadline for all to join, once all of them answer.
        device: Where buckets are packed, and handed to `load`: "cpu", or "cuda" for each process's GPU.

    Raises:
        ValueError: `timeout_s` is no positive number of seconds, there is no such device, or no such
            transport for it.
    """

    def __init__(
        self,
        transport: str | Sequence[str] = "auto",
        *,
        method: str = "join_route",
        name: str = "weights",
        address: str | None = None,
        timeout_s: float = 60.0,
        device: Device = "cpu",
    ) -> None:
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s must be above 0 and finite, got {timeout_s}")
        if device not in _USABLE:
            raise ValueError(f"device must be of {', '.join(_USABLE)}; got {device!r}")
        _check_usable(transport, device)
        self._transport, self._method, self._name = transport, method, name
        self._address, self._timeout_s, self._device = address, timeout_s, device
        self._hosts: list[GroupHost] = []
        self._route: Route | None = None
        self._choice: Choice | None = None
        self._members: tuple[str, ...] = ()
        self._turns = Turns("update goes over this route")
        super().__init__()

    @property
    def choice(self) -> Choice | None:
        """What was chosen last; None before the first update."""
        return self._choice

    def explain(self) -> str:
        """Which transport all use, and why no other one: the text that every member has, too.

        Where a collective was chosen, also which one keeps what it broadcasts.
        """
        return "nothing is chosen before the first update" if self._route is None else self._route.explanation

    def turn(
        self, timeout_s: float | None = 600.0, check: Callable[[], object] | None = None
    ) -> AbstractContextManager[Turn]:
        """One update at a time goes over a route; others wait until it has ended, first come, first served.

        Args:
            timeout_s: How long it is waited for.
            check: Called now and then while it is; what it raises ends the wait.

        Raises:
            TransportTimeoutError: It did not end in time.
            TransportError: It is an update of this very thread, or one that waits for it, for ever; or this
                process was forked from the one that the route belongs to.
        """
        self._check_process()
        return self._turns.turn(timeout_s, check)

    def connect(
        self, trainer: Sequence[Member], generators: Sequence[Member], timeout_s: float | None = 600.0
    ) -> str:
        """Have all members on one route; its key. One that works, and is of these members, stays.

        Args:
            trainer: The ranks that may publish.
            generators: Those that receive.
            timeout_s: Until when all have to have answered: they may be busy.

        Raises:
            NoTransportError: No transport can be used by all members.
            TransportError: A method returned something else than what `RouteStore.join` does, or this process
                was forked from the one that the route belongs to.
            TransportClosedError: This route is closed.
            Exception: What the first member that failed raised; its notes name the others.
        """
        self._check_process()
        with self._lock:
            if self._closed:
                raise TransportClosedError("this WeightRoute is closed")
            peers = {f"trainer {member.number}": member for member in trainer}
            peers |= {f"generator {member.number}": member for member in generators}
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            places = self._ask(peers, {}, deadline)
            key = "" if self._route is None else self._route.key
            if key and self._members == tuple(places) and all(p.key == key for p in places.values()):
                return key
            routes = self._routes(places)
            places = self._ask({name: peers[name] for name in routes}, routes, deadline)
            self._members = tuple(places)
            return next(iter(routes.values())).key

    def forget(self) -> None:
        """Have all join anew before the next update: one that failed reached some members, and others not."""
        self._members = ()

    def close(self) -> None:
        """End the groups: members are told; idempotent, and nothing in a forked child."""
        if self._is_parents:
            return
        with self._lock:
            self._closed = True
            self._end_groups()

    def _routes(self, places: Mapping[str, Place]) -> dict[str, Route]:
        """What each member is told, in place of all that was told before."""
        facts = [place.facts for place in places.values()]
        choice = choose_transport(facts, "broadcast", self._transport, device=self._device)
        self._end_groups()
        senders = [name for name in places if name.startswith("trainer")]
        receivers = [name for name in places if name not in senders]
        keeper = choose_transport(facts, "pull", _KEEPERS) if choice.name in _COLLECTIVES else choice
        told = (choice.name, keeper.name, choice.explain())
        base = Route(uuid.uuid4().hex, *told, timeout_s=self._timeout_s, device=self._device)
        if keeper is not choice:
            kept = f"{base.explanation}\nkept for those who come late: {keeper.explain()}"
            base = replace(base, explanation=kept)
        self._choice, self._route = choice, base
        if keeper is choice:
            return dict.fromkeys(places, base)
        invited = [self._invited(sender, receivers, choice) for sender in senders]

        def route(invitations: Sequence[Invitation], number: int = 0) -> Route:
            return replace(base, invitations=tuple(invitations), number=number)

        routes = {sender: route(invited[i][:1], i) for i, sender in enumerate(senders)}
        for i, receiver in enumerate(receivers):
            routes[receiver] = route([group[i + 1] for group in invited])
        return routes

    def _invited(self, sender: str, receivers: Sequence[str], choice: Choice) -> list[Invitation]:
        """The members of a group in which one publisher sends to all receivers."""
        name = f"{self._name} of {sender}"
        backend: Backend = "nccl" if choice.name == "nccl" else "gloo"
        host = GroupHost(name, [sender, *receivers], backend=backend, address=self._address)
        self._hosts.append(host)
        return host.open()

    def _end_groups(self) -> None:
        while self._hosts:
            self._hosts.pop().close()

    def _give_up(self, why: str) -> None:
        """Have those that join hear by the end of their groups that not all will."""
        self.forget()
        for host in self._hosts:
            host.end(why)

    def _ask(
        self, peers: Mapping[str, Member], told: Mapping[str, Route], deadline: float | None
    ) -> dict[str, Place]:
        """Call the method on all at once; what each says, but for those that take no part.

        Who is told of no route waits for nobody: no threads are needed.
        """
        names = list(peers)
        members = {i: peers[name].peers for i, name in enumerate(names)}
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        first: list[str] = []

        def fail(number: int, error: Exception) -> None:
            """Others hear, before their deadline, of a member that won't come."""
            first.append(names[number])
            self._give_up(f"{names[number]} did not join: {error}")

        called = (members, self._method, lambda i: (told.get(names[i]),), left_s)
        calls: Calls = ThreadedCalls(*called, fail) if told else PlainCalls(*called)
        try:
            calls.start()
            found = {names[i]: outcome for i, outcome in calls.outcomes()}
        except BaseException:
            self._give_up("whoever waited for them was interrupted")
            raise
        _raise_first({n: found[n] for n in (*first, *names) if isinstance(found[n], Exception)})
        strange = {name: p for name, p in found.items() if not isinstance(p, Place | None)}
        if strange or all(found[name] is None for name in names):
            raise TransportError(
                f"{self._method}() has to return what RouteStore.join() returns; got {strange or None}"
            )
        return {name: place for name in names if isinstance(place := found[name], Place)}


def _check_usable(transport: str | Sequence[str], device: Device) -> None:
    asked = (transport,) if isinstance(transport, str) else tuple(transport)
    if transport != "auto" and not (asked and set(asked) <= set(_USABLE[device])):
        names = ", ".join(_USABLE[device])
        raise ValueError(f"transport must be 'auto', or of {names} for device={device!r}; got {transport!r}")


def _raise_first(failures: Mapping[str, object]) -> None:
    errors = {name: error for name, error in failures.items() if isinstance(error, Exception)}
    if errors:
        (first, error), *others = errors.items()
        error.add_note(f"{first} did not join the route of the update")
        for name, other in others:
            error.add_note(f"{name} did not either: {other!r}")
        raise error
