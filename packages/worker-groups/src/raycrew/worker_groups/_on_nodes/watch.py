"""The watch of a node: an actor that reads the process table, remembers what workers start, and ends it.

Standard library only: it is sent by value, whatever its environment has.
"""

import asyncio
import logging
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from raycrew.worker_groups._on_nodes.examining import Wanted, examine
from raycrew.worker_groups._on_nodes.family import Family
from raycrew.worker_groups._on_nodes.keeper import Keeper
from raycrew.worker_groups._on_nodes.limits import MemoryLimits
from raycrew.worker_groups._on_nodes.lookout import Lookout
from raycrew.worker_groups._on_nodes.process_table import Process, kill, pid_namespace, runs
from raycrew.worker_groups._on_nodes.sight import Ran, Sights
from raycrew.worker_groups._on_nodes.stacks import stacks_of

logger = logging.getLogger(__name__)

#: A worker as it is told to a watch: process id, start in clock ticks, mark, namespace of its process id, and
#: most private memory in bytes, or 0.
Told = tuple[int, int, str, str, int]

_LOOK_S = 1.0  # between two looks at the table, and at most one part in 400 of the time is spent on them
_POLL_S = 0.01
_MEMORY_PART = 50  # between two looks at the memory of workers there is as many times what one takes
_FOREIGN = "its process id is of another namespace than its node's"
_ORPHANS_S = 1.0  # for what a worker leaves behind to end by itself, as Python's resource tracker does


def _started(sources: Mapping[str, str]) -> Keeper | None:
    try:
        return Keeper(sources)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("what workers leave behind will outlive a driver that is killed: %s", error)
        return None


class Watch:
    """Knows the workers of its node that it was told of; methods take several of them, in any state.

    Args:
        sources: Texts of the modules that its keeper runs; without them it has none.
    """

    def __init__(self, sources: Mapping[str, str] | None = None) -> None:
        self._lookout = Lookout()
        self._sights = Sights()
        self._keeper = None if sources is None else _started(sources)
        self._limits = MemoryLimits()
        self._looking: asyncio.Task[None] | None = None
        self._limiting: asyncio.Task[None] | None = None

    async def follow(self, workers: Sequence[Told], timeout_s: float) -> list[bool]:
        """Remember from now on what these workers start; of each whether this watch and its keeper do."""
        deadline = time.monotonic() + timeout_s
        for worker in workers:
            if worker[3] == pid_namespace():
                self._family(worker)
        self._look()
        self._begin_looking()
        while not (kept := self._keeper is not None and self._keeper.tell(self._lookout, self._limits)):
            if self._keeper is None or time.monotonic() >= deadline:
                break
            await asyncio.sleep(_POLL_S)
        return [kept and worker[3] == pid_namespace() for worker in workers]

    async def see(self, workers: Sequence[Told], timeout_s: float) -> list[dict[str, Any] | str]:  # noqa: ARG002 - as all are asked
        """How each of these workers is at this moment, or why that can't be told."""
        sights = [self._sight_or_why_not(worker) for worker in workers]
        self._begin_looking()  # after them: whom a new watch is told of by this may have limits
        return sights

    async def record(
        self,
        workers: Sequence[Told],
        timeout_s: float,  # noqa: ARG002 - as all are asked
        seen: Sequence[int | None],
    ) -> list[Ran | str | None]:
        """The calls that each of these has noted after the first so many; they note the next ones."""
        return [self._record(*one, is_last=False) for one in zip(workers, seen, strict=True)]

    async def record_last(
        self,
        workers: Sequence[Told],
        timeout_s: float,  # noqa: ARG002 - as all are asked
        seen: Sequence[int | None],
    ) -> list[Ran | str | None]:
        """The same, and they note no more after a while, unless somebody else wants it."""
        return [self._record(*one, is_last=True) for one in zip(workers, seen, strict=True)]

    def _record(self, worker: Told, seen: int | None, *, is_last: bool) -> Ran | str | None:
        if worker[3] != pid_namespace():
            return _FOREIGN
        return self._sights.record(Process(worker[0], worker[1]), worker[2], seen, is_last=is_last)

    async def report(self) -> list[tuple[int, int, dict[str, Any] | str]]:
        """Process id, start and sight of each worker that this watch was told of; asked without marks."""
        here, families = pid_namespace(), self._lookout.families
        workers = [(*root, family.mark, here, 0) for root, family in families.items()]
        return [(worker[0], worker[1], self._sight_or_why_not(worker)) for worker in workers]

    async def stacks(
        self, processes: Sequence[tuple[int, int]], timeout_s: float
    ) -> list[tuple[str, str] | None]:
        """The stacks of workers' threads and what told them, or why not; None of those it does not know."""
        known = [self._lookout.families.get(Process(*process)) for process in processes]
        asked = [self._stacks_or_why_not(family, timeout_s) for family in known if family is not None]
        found = iter(await asyncio.gather(*asked))
        return [None if family is None else next(found) for family in known]

    async def _stacks_or_why_not(self, family: Family, timeout_s: float) -> tuple[str, str]:
        try:
            return await stacks_of(family.root, family.mark, timeout_s)
        except Exception as error:  # whatever is wrong with one worker, the others are told of
            logger.exception("the stacks of process %d can't be had", family.root.pid)
            return f"its node's watch can't look at it: {type(error).__name__}: {error}", ""

    async def examine(
        self, workers: Sequence[Told], timeout_s: float, wanted: Sequence[Wanted]
    ) -> list[dict[str, Any]]:
        """How each of these workers is, and what else is wanted of it; or why a part is not there."""
        sights = await self.see(workers, timeout_s)
        asked = [
            self._examined(worker, sight, own, timeout_s)
            for worker, sight, own in zip(workers, sights, wanted, strict=True)
        ]
        return list(await asyncio.gather(*asked))

    async def examine_known(
        self, processes: Sequence[tuple[int, int]], timeout_s: float, wanted: Sequence[Wanted]
    ) -> list[dict[str, Any] | None]:
        """The same, asked without marks, and with the output where it was seen; None of those not known."""
        known = [self._lookout.families.get(Process(*process)) for process in processes]
        asked = [
            self._examined_family(family, own, timeout_s)
            for family, own in zip(known, wanted, strict=True)
            if family is not None
        ]
        found = iter(await asyncio.gather(*asked))
        return [None if family is None else next(found) for family in known]

    async def _examined_family(self, family: Family, wanted: Wanted, timeout_s: float) -> dict[str, Any]:
        worker = (*family.root, family.mark, pid_namespace(), 0)
        own = {**wanted, "log_paths": self._sights.outputs(family.root)}
        return await self._examined(worker, self._sight_or_why_not(worker), own, timeout_s)

    async def _examined(
        self, worker: Told, sight: dict[str, Any] | str, wanted: Wanted, timeout_s: float
    ) -> dict[str, Any]:
        is_here = worker[3] == pid_namespace()
        found = await examine(Process(worker[0], worker[1]), worker[2], wanted, timeout_s) if is_here else {}
        return {"seen": sight, **found}

    def _sight_or_why_not(self, worker: Told) -> dict[str, Any] | str:
        if worker[3] != pid_namespace():
            return _FOREIGN
        try:
            return self._sight(worker)
        except Exception as error:  # whatever is wrong with one worker, the others are told of
            logger.exception("process %d can't be looked at", worker[0])
            return f"its node's watch can't look at it: {type(error).__name__}: {error}"

    def _sight(self, worker: Told) -> dict[str, Any]:
        root = Process(worker[0], worker[1])
        seen = self._sights.of(root, self._family(worker)) if runs(root) else self._sights.of_gone(root)
        return {**seen, "ended_at_bytes": self._limits.exceeded.get(root)}

    async def await_exit(self, workers: Sequence[Told], timeout_s: float) -> list[int]:
        """Wait until workers have ended by themselves; gives the positions of those that have not.

        What they leave behind gets a moment to end too.
        """
        deadline = time.monotonic() + timeout_s
        roots = [Process(worker[0], worker[1]) for worker in workers]
        while any(map(runs, roots)) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        foreign = [worker[3] != pid_namespace() for worker in workers]
        late = [position for position, root in enumerate(roots) if foreign[position] or runs(root)]
        deadline = min(deadline, time.monotonic() + _ORPHANS_S)
        while not late and self._left(workers) and time.monotonic() < deadline:
            await asyncio.sleep(5 * _POLL_S)
        return late

    async def end(self, workers: Sequence[Told], timeout_s: float) -> list[list[int] | None]:
        """Kill workers and all that they have started, and wait until they are gone.

        Returns:
            For each worker the process ids that are left; None for one whose processes this watch can't see.
        """
        deadline, pause_s = time.monotonic() + timeout_s, _POLL_S
        while (left := self._left(workers)) and time.monotonic() < deadline:
            for process in left:
                kill(process)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 20 * _POLL_S)
        return [self._result(worker) for worker in workers]

    def _result(self, worker: Told) -> list[int] | None:
        if worker[3] != pid_namespace():
            return None
        family = self._family(worker)
        if not family.members:
            self._lookout.families.pop(family.root, None)
            self._sights.forget(family.root)
        return sorted(member.pid for member in family.members)

    def _family(self, worker: Told) -> Family:
        pid, started, mark, _, limit_bytes = worker
        family = self._lookout.family(Process(pid, started), mark)
        self._sights.open(family.root, mark)
        self._limits.set(family.root, limit_bytes)
        return family

    def _left(self, workers: Sequence[Told]) -> set[Process]:
        here = [self._family(worker) for worker in workers if worker[3] == pid_namespace()]
        self._look()
        return {member for family in here for member in family.members}

    def _look(self) -> None:
        self._sights.take_in(self._lookout.families, self._lookout.look())
        if self._keeper is not None:
            self._keeper.tell(self._lookout, self._limits)

    def _begin_looking(self) -> None:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._keep_looking())
        if self._limits.are_set and (self._limiting is None or self._limiting.done()):
            self._limiting = asyncio.create_task(self._keep_limits())

    async def _keep_limits(self) -> None:
        while self._limits.are_set:
            began = time.thread_time()
            pause_s = self._limits.enforce()
            await asyncio.sleep(max(pause_s, _MEMORY_PART * (time.thread_time() - began)))

    async def _keep_looking(self) -> None:
        while self._lookout.families:
            began = time.thread_time()
            try:
                self._look()
            except OSError as error:
                logger.warning("the process table can't be read now: %s", error)
            await asyncio.sleep(max(_LOOK_S, 400 * (time.thread_time() - began)))
