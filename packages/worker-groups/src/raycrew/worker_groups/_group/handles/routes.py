"""How the calls of a handle reach a group's workers."""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ray.exceptions import RayError

from raycrew.cluster_core import Session
from raycrew.worker_groups._calls import (
    Dispatch,
    GroupShape,
    MultiWorkerFuture,
    Recovery,
    Whereabouts,
    parts_of,
    send_to_actors,
)
from raycrew.worker_groups._group.handles.directory import Address, DirectoryGoneError
from raycrew.worker_groups._group.handles.members import Members
from raycrew.worker_groups._ray import (
    actor_states,
    check_session,
    current_session,
    is_behind_proxy,
    may_come_back,
    while_connected,
)
from raycrew.worker_groups._worker import ClassInfo
from raycrew.worker_groups.balancing import ProcessUsage, WorkerLoad
from raycrew.worker_groups.errors import WorkerFailureError, WorkerGroupClosedError, WorkerGroupError
from raycrew.worker_groups.protocols import ArgumentTransport

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_STATUS_S = 1.0
_QUIET_S = 10.0  # after a question that nobody answered
_FOLLOW_S = 5.0  # between two looks at whether anybody has joined or left

Strategy = str | Callable[[Sequence[WorkerLoad], Any], int]


class Route(ABC):
    """What a handle needs of a group.

    Attributes:
        name: Name of the group.
        info: The worker class.
        strategy: How a balancer chooses; None where the group has none.
        idempotent_methods: Methods that may run twice.
    """

    name: str
    info: ClassInfo
    strategy: Strategy | None
    idempotent_methods: Sequence[str]

    @abstractmethod
    def shape(self) -> GroupShape:
        """The group's shape, of its newest members where some are known to be dead.

        Raises:
            WorkerGroupClosedError: The group is known to have ended.
        """

    @abstractmethod
    def known(self) -> Members:
        """The members as far as they are known; asks nobody."""

    @abstractmethod
    def members(self) -> Members:
        """The members as far as they are known, or can be found out."""

    @abstractmethod
    def refresh(self) -> None:
        """Ask who the members are now.

        Raises:
            WorkerGroupClosedError: The group was shut down.
        """

    @abstractmethod
    def send(self, dispatch: Dispatch, timeout: float | None) -> MultiWorkerFuture[Any, Any]:
        """Send each call of a dispatch."""

    @abstractmethod
    def usage(self) -> Mapping[int, float]:
        """CPU use by rank, as far as it is known."""


@dataclass(frozen=True, slots=True)
class Contact:
    """What never changes about a group, and may be known to everybody.

    Attributes:
        address: Where its members can be asked for.
        info: The worker class, without its options.
        transport: What encodes arguments.
        in_order: Whether the workers run their calls one after the other.
        strategy: How a balancer chooses; None where the group has none.
        idempotent_methods: Methods that may run twice.
        session: The connection to Ray that all this belongs to; None where it is that of whoever gets it.
    """

    address: Address
    info: ClassInfo
    transport: ArgumentTransport | None
    in_order: bool
    strategy: Strategy | None
    idempotent_methods: Sequence[str]
    session: Session | None


class _QuietError(WorkerGroupError):
    """Nobody is asked now."""


class _Known:
    """Members, and what follows from who they are."""

    def __init__(self, contact: Contact, members: Members) -> None:
        self.members = members
        pairs = list(zip(members.ranks, members.facts, strict=True))
        name = contact.address.group_name
        self.places = {info.rank: Whereabouts(name, info, facts) for info, facts in pairs}
        self.shape = GroupShape(contact.info, len(pairs), members.tied_groups, members.sharding)
        self.may_be_resized = len(members.tied_groups) == len(pairs)
        self.usage = ProcessUsage({info.rank: (facts.node_id, facts.pid) for info, facts in pairs})


class RayRoute(Route):
    """Straight to the actors; who they are is asked anew once one is seen to have died.

    Args:
        contact: What never changes.
        members: Who they are as far as is known.
    """

    def __init__(self, contact: Contact, members: Members) -> None:
        self._contact = replace(contact, session=contact.session or current_session())
        self._known = _Known(contact, members)
        self._lock = threading.RLock()
        self._misses_some = False
        self._asked_at = self._quiet_until = float("-inf")
        self._followed_at = time.monotonic()
        self.name, self.info = contact.address.group_name, contact.info
        self.strategy, self.idempotent_methods = contact.strategy, contact.idempotent_methods

    def __reduce__(self) -> tuple[Any, ...]:
        # Behind a proxy a session is this process's own.
        session = None if is_behind_proxy() else self._contact.session
        return RayRoute, (replace(self._contact, session=session), self._known.members)

    def shape(self) -> GroupShape:
        """See `Route`."""
        self._check()
        if self._misses_some:
            self._ask_again()
        elif self._known.may_be_resized and time.monotonic() - self._followed_at >= _FOLLOW_S:
            self._followed_at = time.monotonic()
            threading.Thread(target=self._follow, name="raycrew-follow", daemon=True).start()
        return self._known.shape

    def known(self) -> Members:
        """See `Route`."""
        return self._known.members

    def members(self) -> Members:
        """See `Route`; where some are dead, others are asked for now and then."""
        if self._misses_some and time.monotonic() - self._asked_at >= _LOOK_S:
            self._ask_again()
        return self._known.members

    def refresh(self) -> None:
        """See `Route`."""
        self._check()
        self._ask()

    def send(self, dispatch: Dispatch, timeout: float | None) -> MultiWorkerFuture[Any, Any]:
        """See `Route`."""
        known, contact = self._known, self._contact
        dispatch.check_size(len(known.members.ranks), self.name)
        if dispatch.join is not None:
            dispatch = replace(dispatch, join=replace(dispatch.join, transport=contact.transport))
        return send_to_actors(
            dispatch,
            known.members.handles,
            known.places,
            group_name=self.name,
            transport=contact.transport,
            timeout=timeout,
            in_order=contact.in_order,
            keeper=None,
            session=contact.session or current_session(),
            recovery=Recovery(
                partial(self._after_death, known.members.generation),
                seen=partial(self._miss_some, known.members.generation),
            ),
        )

    def usage(self) -> Mapping[int, float]:
        """See `Route`."""
        return self._known.usage()

    def _check(self) -> None:
        check_session(self._contact.session, f"a handle of worker group {self.name!r}")

    def _after_death(self, generation: int, error: WorkerFailureError) -> bool:
        """Find out who the members are now; what may have run is never sent again."""
        try:
            self._ask_beyond(generation)
        except (WorkerGroupError, RayError) as unknown:
            error.add_note(f"who the group's members are now is not known: {unknown}")
        died = any(part.cause is not None and not may_come_back(part.cause) for part in parts_of(error))
        now = self._known.members.generation
        if now > generation:
            error.add_note(
                f"this handle calls the group's generation {now} from now on; this call may have run, "
                "and was not sent again"
            )
        elif died and self._miss_some(generation):
            error.add_note("the group has no newer workers yet; this handle asks again before its next call")
        return False

    def _miss_some(self, generation: int) -> bool:
        """Ask again from now on, as workers of a generation have died; whether no later one is known."""
        with self._lock:
            is_last = self._known.members.generation <= generation
            self._misses_some |= is_last
        return is_last

    def _ask_again(self) -> None:
        try:
            self._ask_beyond(self._known.members.generation)
        except WorkerGroupClosedError:
            raise
        except _QuietError:
            pass
        except (WorkerGroupError, RayError) as error:
            logger.warning("who the members of %s are now is not known: %s", self.name, error)

    def _follow(self) -> None:
        """Find out who the members are now, while calls go on."""
        try:
            newer = self._contact.address.newer_than(self._known.members.generation, self._check)
        except (WorkerGroupError, RayError) as error:  # as long as nobody has died, it does not matter
            logger.debug("who the members of %s are now is not known: %s", self.name, error)
            return
        with self._lock:
            if newer is not None and newer.generation > self._known.members.generation:
                self._known, self._misses_some = _Known(self._contact, newer), False

    def _ask_beyond(self, generation: int) -> None:
        """Ask for members of a later generation; of several threads one asks, also where nobody answers."""
        self._check()  # first: a forked process waits for no lock
        with self._lock:
            if self._known.members.generation > generation:
                return
            if time.monotonic() < self._quiet_until:
                raise _QuietError(f"who knows the members of {self.name!r} did not answer a moment ago")
            try:
                self._ask()
            except WorkerGroupClosedError:
                raise
            except (WorkerGroupError, RayError):
                self._quiet_until = time.monotonic() + _QUIET_S
                raise

    def _ask(self) -> None:
        with self._lock:
            try:
                newer = self._contact.address.newer_than(self._known.members.generation, self._check)
            except DirectoryGoneError as gone:
                if not self._are_all_dead():
                    raise
                said = f"worker group {self.name!r} was shut down, or all of it was lost: {gone}"
                raise WorkerGroupClosedError(said) from gone
            finally:
                self._asked_at = time.monotonic()
            if newer is not None:
                self._known, self._misses_some = _Known(self._contact, newer), False

    def _are_all_dead(self) -> bool:
        with while_connected(self._check):
            states = actor_states(self._known.members.handles, _STATUS_S)
        return set(states.values()) == {"dead"}


class LocalRoute(Route):
    """To the workers of a group in this process.

    Args:
        name: See `Route`.
        info: See `Route`.
        strategy: See `Route`.
        idempotent_methods: See `Route`.
        shape: The group's shape; raises when it has ended.
        members: Who its members are.
        send: Sends a dispatch.
    """

    def __init__(
        self,
        name: str,
        info: ClassInfo,
        strategy: Strategy | None,
        idempotent_methods: Sequence[str],
        shape: Callable[[], GroupShape],
        members: Callable[[], Members],
        send: Callable[[Dispatch, float | None], MultiWorkerFuture[Any, Any]],
    ) -> None:
        self.name, self.info = name, info
        self.strategy, self.idempotent_methods = strategy, idempotent_methods
        self._shape, self._members, self._send = shape, members, send

    def __reduce__(self) -> str:
        raise TypeError(
            f"{self.name!r} is a group of threads of this process: no handle of it can be pickled"
        )

    def shape(self) -> GroupShape:
        """See `Route`."""
        return self._shape()

    def known(self) -> Members:
        """See `Route`."""
        return self._members()

    def members(self) -> Members:
        """See `Route`."""
        return self._members()

    def refresh(self) -> None:
        """See `Route`."""
        self._shape()

    def send(self, dispatch: Dispatch, timeout: float | None) -> MultiWorkerFuture[Any, Any]:
        """See `Route`."""
        return self._send(dispatch, timeout)

    def usage(self) -> Mapping[int, float]:
        """See `Route`."""
        return {}
