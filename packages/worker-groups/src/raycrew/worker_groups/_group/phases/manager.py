"""Several groups on the same devices, awake in turns."""

import time
from dataclasses import dataclass
from functools import partial

from raycrew.worker_groups._calls import deadline_after, dispatch_single, left
from raycrew.worker_groups._group.base import WorkerGroup
from raycrew.worker_groups._group.phases.entrance import Entrance
from raycrew.worker_groups._group.phases.looking import Looking
from raycrew.worker_groups._group.phases.marks import Look, PhaseReport
from raycrew.worker_groups._group.phases.occupancy import Occupancy
from raycrew.worker_groups._group.phases.turn import PhaseTurn, may_block, whoever_asks
from raycrew.worker_groups._health import Span, observed
from raycrew.worker_groups.errors import (
    PhaseError,
    PhaseTimeoutError,
    WorkerGroupClosedError,
    WorkerGroupError,
)

_LOOK_WITHIN_S = 0.5


@dataclass(slots=True)
class Member:
    """A group, with its methods' names, and its generation when it was put to sleep or woken."""

    group: WorkerGroup
    sleep: str
    wake: str
    generation: int


class PhaseManager:
    """Several groups on the same bundles, of which at most one is awake: the phases of a run.

    Whoever wants a group's turn asks for it; the others are put to sleep first, one after the other, and only
    when all of them have answered is that group woken. It stays awake after its turn, until another one's.
    A group is any on whose workers one method gives up the memory and another one takes it again:
    `offload` and `onload` of a trainer, `sleep` and `wake` of a generator. Either is called on all ranks, and
    may be called when that is so already, and then does nothing.

    Turns are taken by threads and tasks of the process that has the groups, one at a time, first come, first
    served. Within a turn the same thread or task may take it again, which wakes what was replaced meanwhile.

    Where a step fails, nobody is woken: whoever may have memory has to be put to sleep before another one's
    turn, which is tried then. Where workers were replaced, they are put to sleep, or woken, before the next
    turn. In order that those that start while another group has its turn take no memory until then, they ask
    `may_wake` (see there). Give `sleep` and `wake` as `idempotent_methods` of groups that restart by
    themselves, so that a turn survives a worker's death.

    Args:
        *names: What the members are called, in the order in which they are put to sleep.
        timeout_s: Within which a turn comes, waiting and steps included; None for no limit.
        look_s: Between two looks at the memory of all ranks, while a turn goes on or changes; None for no
            marks.

    Raises:
        ValueError: Names are missing, empty or there twice, or a time is not above 0.

    Examples:
        >>> class Model:
        ...     def __init__(self) -> None:
        ...         self.wake()
        ...
        ...     def sleep(self) -> None:
        ...         self.memory = b""
        ...
        ...     def wake(self) -> None:
        ...         self.memory = self.memory or bytes(1 << 20)
        ...
        ...     memory = b""
        >>> phases, groups = PhaseManager("train", "generate"), []
        >>> for name in ("train", "generate"):  # the trainer sleeps before a generator is there
        ...     with phases.turn(name):
        ...         groups.append(RayWorkerGroup(cluster, Model))
        ...         phases.add(name, groups[-1])
        >>> phases
        PhaseManager(train asleep, generate awake)
        >>> with phases.turn("train"):
        ...     phases.awake
        'train'
        >>> all(group.shutdown() for group in groups)
        True
    """

    def __init__(self, *names: str, timeout_s: float | None = 600.0, look_s: float | None = 0.25) -> None:
        if not names or len(set(names)) != len(names) or not all(names):
            raise ValueError(f"members have names of their own, not {names}")
        for what, seconds in (("timeout_s", timeout_s), ("look_s", look_s)):
            if seconds is not None and not seconds > 0:
                raise ValueError(f"{what} is {seconds!r}; it is above 0, or None")
        self._timeout_s = timeout_s
        self._members: dict[str, Member] = {}
        self._occupancy = Occupancy.of(names)
        self._entrance = Entrance()
        self._looking = Looking(self._look, look_s)
        self._began = 0.0

    def turn(self, name: str, timeout_s: float | None = None) -> "PhaseTurn":
        """A turn of a member, for `with` or `async with`: within, it is awake, and all others sleep.

        A member that has no group yet may start it within, and `add` it.

        Args:
            name: The member.
            timeout_s: Within which it comes; None for the manager's.

        Raises:
            ValueError: There is no such member.
        """
        self._check(name)
        within_s = self._timeout_s if timeout_s is None else timeout_s
        return PhaseTurn(partial(self._enter, name, within_s), self._leave)

    def add(self, name: str, group: WorkerGroup, *, sleep: str = "sleep", wake: str = "wake") -> None:
        """Take in the group of a member, within the turn of it in which it was started: it is awake.

        Args:
            name: The member.
            group: Its group, of this process.
            sleep: Method that gives up the memory; without arguments.
            wake: Method that takes it again; without arguments.

        Raises:
            ValueError: There is no such member.
            PhaseError: This is no turn of it, or it has a group already.
            UnknownMethodError: The workers have no such method; they are not taken in.
            TypeError: A method needs arguments; they are not taken in.
        """
        self._check(name)
        if self._entrance.turn_of(whoever_asks()) != name:
            raise PhaseError(f"a group of {name!r} is added within its turn, while no other is awake", name)
        if name in self._members:
            raise PhaseError(f"{name!r} has a group; remove() it first", name)
        for method in (sleep, wake):
            dispatch_single(group._open(), method, (), {})  # noqa: SLF001
        self._members[name] = Member(group, sleep, wake, group.generation)
        self._occupancy = self._occupancy.joined(name)

    def remove(self, name: str) -> None:
        """Forget the group of a member, which has been shut down; without one this does nothing.

        Raises:
            ValueError: There is no such member.
            PhaseTimeoutError: Another one's turn was not over in time.
            PhaseError: This is a turn of another one, or a task would have to wait, and block its event loop:
                within `async with phases.turn(name)` it need not.
        """
        self._check(name)
        me = whoever_asks()
        self._entrance.enter(me, name, deadline_after(self._timeout_s), may_wait=may_block(me))
        try:
            self._members.pop(name, None)
            self._occupancy = self._occupancy.without(name)
        finally:
            self._entrance.leave(me)

    def may_wake(self, name: str) -> bool:
        """Whether workers of a member that start now may take memory; else they have to come up asleep.

        To be asked where their group starts and restarts them, in its `init`:
        `init=lambda rank: {"asleep": not phases.may_wake("generate")}`.

        Raises:
            ValueError: There is no such member.
        """
        self._check(name)
        return self._occupancy.holder == name

    @property
    def awake(self) -> str | None:
        """The member that is awake."""
        return next((name for name, state in self._occupancy.states.items() if state == "awake"), None)

    def report(self) -> PhaseReport:
        """How often and how long each phase was, and how much memory workers had at most in it."""
        return PhaseReport.of(self._occupancy, self._looking.phases())

    def explain(self) -> str:
        """The members and their methods, and the report, in words."""
        members = list(self._members.items())
        said = [f"{name}: {m.group.name}, {m.sleep}() and {m.wake}()" for name, m in members]
        return "\n".join([*said, str(self.report())])

    def __repr__(self) -> str:
        states = ", ".join(f"{name} {state}" for name, state in self._occupancy.states.items())
        return f"{type(self).__name__}({states})"

    def _check(self, name: str) -> None:
        if name not in self._occupancy.states:
            raise ValueError(f"there is no member {name!r}; there are {list(self._occupancy.states)}")

    # A turn

    def _enter(self, name: str, timeout_s: float | None, who: object, may_wait: bool) -> None:
        """Come in, put the others to sleep, and wake the member, in this order."""
        deadline = deadline_after(timeout_s)
        is_first = self._entrance.enter(who, name, deadline, may_wait=may_wait)
        try:
            if is_first:
                self._began = time.monotonic()
                self._looking.begin(f"to {name}")
            self._change(name, deadline)
            if is_first:
                self._looking.begin(name)
        except BaseException:
            self._leave(who)
            raise

    def _change(self, name: str, deadline: float | None) -> None:
        for other, member in self._members.items():
            if member.group.generation != member.generation:
                self._occupancy = self._occupancy.doubted(other)
        for other in self._occupancy.in_the_way_of(name):
            self._occupancy = self._occupancy.falling_asleep(other)
            self._call(other, self._members[other].sleep, deadline)
            self._occupancy = self._occupancy.asleep(other)
        self._occupancy = self._occupancy.taken_by(name)
        if self._occupancy.has_to_wake(name):
            self._wake(name, deadline)

    def _wake(self, name: str, deadline: float | None) -> None:
        self._occupancy = self._occupancy.waking(name)
        self._call(name, self._members[name].wake, deadline)
        self._occupancy = self._occupancy.awake(name)

    def _leave(self, who: object) -> None:
        try:
            if (name := self._entrance.is_about_to_leave(who)) is not None:
                self._looking.end()
                _tell(name, "turn", self._began)
        finally:
            self._entrance.leave(who)

    def _call(self, name: str, method: str, deadline: float | None) -> None:
        """Call a method on all ranks, also on those that are being replaced."""
        member, began = self._members[name], time.monotonic()
        group = member.group
        member.generation = group.generation
        try:
            ranks = list(range(group.world_size))
            group.on(ranks=ranks, timeout=left(deadline)).call(method).get_results()
        except WorkerGroupError as error:
            mend = f"remove({name!r})" if isinstance(error, WorkerGroupClosedError) else "mend it"
            said = f"{method}() of {name!r} failed, and nobody was woken: {mend}, and take the turn again"
            kind = PhaseTimeoutError if isinstance(error, TimeoutError) else PhaseError
            raise kind(said, name) from error
        finally:
            _tell(name, method, began)

    def _look(self) -> Look:
        members = list(self._members.items())
        return {name: member.group.get_resource_usage(_LOOK_WITHIN_S) for name, member in members}


def _tell(row: str, what: str, began: float) -> None:
    if (observer := observed.by) is not None:
        observer.spanned(Span("phases", row, what, what, began, time.monotonic()))
