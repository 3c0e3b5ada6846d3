"""The named actor that says who the members of a group are now: the group tells it, handles ask it."""

import logging
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycrew.cluster_core import ClusterError
from raycrew.worker_groups._group.handles.members import Members
from raycrew.worker_groups._ray import (
    current_session,
    end_actors,
    find_actor,
    is_behind_proxy,
    may_come_back,
    own_namespace,
    own_node,
    start_actor,
    while_connected,
)
from raycrew.worker_groups.errors import WorkerGroupClosedError, WorkerGroupError

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0

_REFUSALS = (RayError, WorkerGroupError, ClusterError, ValueError)  # the last: Ray still holds its name


class DirectoryGoneError(WorkerGroupError):
    """There is no directory: its group has ended, or the directory alone was lost."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the members of a group can be asked for.

    Attributes:
        group_name: Name of the group.
        actor: Name of the actor.
        namespace: The namespace of that name.
        key: What no other actor says, which may get that name once this one is gone.
    """

    group_name: str
    actor: str
    namespace: str
    key: str

    def newer_than(self, generation: int, check: Callable[[], object]) -> Members | None:
        """The members of the group, if they are of a later generation.

        Args:
            generation: Of those that are known.
            check: Raises where the connection to Ray has ended.

        Raises:
            DirectoryGoneError: There is nobody to ask.
            WorkerGroupError: There is no answer in time, or the connection to Ray has ended.
            RayError: Ray failed otherwise.
        """
        with while_connected(check) as session:
            handle = find_actor(self.actor, self.namespace)
            if handle is None:
                raise DirectoryGoneError(f"nobody knows the members of {self.group_name!r} any more")
            try:
                asked = handle.newer_than.remote(generation)
                found: Members | None = self._own(session.get(asked, timeout=_ANSWER_S))
            except (AttributeError, TypeError, ValueError, RayTaskError) as error:
                other = f"{self.actor!r}, which knew the members of {self.group_name!r}, is another actor now"
                raise DirectoryGoneError(other) from error
            except GetTimeoutError as error:
                late = f"who knows the members of {self.group_name!r} did not answer within {_ANSWER_S:g} s"
                raise WorkerGroupError(late) from error
            except RayActorError as error:
                if may_come_back(error):
                    raise
                gone = f"who knew the members of {self.group_name!r} has died"
                raise DirectoryGoneError(gone) from error
        return found

    def _own(self, answer: tuple[str, Members | None]) -> Members | None:
        key, found = answer
        if key != self.key:
            raise ValueError("it is of others")
        return found


class MemberList:
    """The actor itself."""

    def __init__(self, key: str, members: Members) -> None:
        self._key, self._members = key, members

    def replace(self, members: Members) -> None:
        """From now on these are the members."""
        self._members = members

    def newer_than(self, generation: int) -> tuple[str, Members | None]:
        """Whose members these are, and who, if they are of a later generation."""
        return self._key, self._members if self._members.generation > generation else None


class Directory:
    """A group's side of that actor, which there is from the first handle on until the group ends.

    Args:
        group_name: Name of the group.
    """

    def __init__(self, group_name: str) -> None:
        self._group_name = group_name
        self._key = uuid.uuid4().hex
        self._name = f"{group_name}-members-{self._key[:8]}"
        self._actor: Any = None
        self._is_over = False
        self._lock = threading.Lock()

    def open(self, members: Callable[[], Members]) -> tuple[Address, Members]:
        """Where the members can be asked for, and who they are; an actor that was lost is made anew.

        Raises:
            WorkerGroupClosedError: The group has ended, perhaps meanwhile.
            GetTimeoutError: Ray's control service does not answer.
        """
        with self._lock:
            now = members()
            if not self._is_over:
                self._tell_or_log(now, may_fail=self._actor is not None)
            if self._is_over:
                raise WorkerGroupClosedError(f"worker group {self._group_name!r} was shut down")
            return Address(self._group_name, self._name, own_namespace(), self._key), now

    def publish(self, members: Callable[[], Members]) -> None:
        """Tell who the members are, where anybody has a handle; that nobody can be told is logged."""
        with self._lock:
            if self._actor is not None and not self._is_over:
                self._tell_or_log(members(), may_fail=True)

    def _tell_or_log(self, members: Members, *, may_fail: bool) -> None:
        try:
            self._tell(members)
        except _REFUSALS as error:
            if not may_fail:
                raise
            logger.warning("handles of %s can't be told of its members: %s", self._group_name, error)

    def _tell(self, members: Members) -> None:
        """Tell the actor, which is made where there is none: its node is gone, say, or somebody ended it."""
        if (actor := self._actor) is None:
            self._start(members)
            return
        session = current_session()
        try:
            with session.while_connected():
                told = actor.replace.remote(members)
            session.get(told, timeout=_ANSWER_S)
        except RayActorError as error:
            if may_come_back(error):  # it still has its name
                raise
            self._start(members)

    def _start(self, members: Members) -> None:
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "name": self._name}
        if not is_behind_proxy():  # beside its owner, which is the last that should be lost
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(own_node()[0], soft=True)
        remote: Any = ray.remote
        self._actor = start_actor(remote(MemberList), options, arguments=[self._key, members])
        if self._is_over:  # meanwhile
            self.end()

    def end(self) -> None:
        """End the actor, for good; waits for no lock, which who a signal handler interrupted may hold."""
        self._is_over = True
        actor, self._actor = self._actor, None
        if actor is not None:
            try:
                end_actors([actor])
            except WorkerGroupError as error:  # the connection ends, and the actor with it
                logger.debug("%s: %s", self._name, error)
