"""The watch of a node: an actor that reads the process table, remembers what workers start, and ends it.

Standard library only: it is sent by value, whatever its environment has.
"""

import asyncio
import os
import time
from collections.abc import Sequence

from raycrew.worker_groups._health.family import Family
from raycrew.worker_groups._health.marks import marks_of
from raycrew.worker_groups._health.process_table import (
    Process,
    Table,
    ancestors,
    kill,
    pid_namespace,
    read_table,
    runs,
)

#: A worker as it is told to a watch: process id, start in clock ticks, mark, namespace of its process id.
Told = tuple[int, int, str, str]

_LOOK_S = 1.0  # between two looks at the table, and at most one part in fifty of the time is spent on them
_POLL_S = 0.01
_ORPHANS_S = 1.0  # for what a worker leaves behind to end by itself, as Python's resource tracker does


class Watch:
    """Knows the workers of its node that it was told of; methods take several of them, in any state."""

    def __init__(self) -> None:
        self._families: dict[Process, Family] = {}
        self._marks: dict[Process, frozenset[str]] = {}
        self._looking: asyncio.Task[None] | None = None

    async def follow(self, workers: Sequence[Told]) -> None:
        """Remember from now on what these workers start."""
        for worker in workers:
            self._family(worker)
        self._look()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._keep_looking())

    async def await_exit(self, workers: Sequence[Told], timeout_s: float) -> list[int]:
        """Wait until workers have ended by themselves; gives the positions of those that have not.

        What they leave behind gets a moment to end too.
        """
        deadline = time.monotonic() + timeout_s
        roots = [self._family(worker).root for worker in workers]
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
            del self._families[family.root]
        return sorted(member.pid for member in family.members)

    def _family(self, worker: Told) -> Family:
        pid, started, mark, _ = worker
        return self._families.setdefault(Process(pid, started), Family(Process(pid, started), mark))

    def _left(self, workers: Sequence[Told]) -> set[Process]:
        here = [self._family(worker) for worker in workers if worker[3] == pid_namespace()]
        self._look()
        return {member for family in here for member in family.members}

    def _look(self) -> None:
        table = read_table()
        self._read_marks(table)
        for family in self._families.values():
            family.update(table, self._marks)

    def _read_marks(self, table: Table) -> None:
        """Of each process once, and only of those whose parent may have been another.

        What has lost its parent is a child of one of this process's ancestors, for they are the workers' too.
        """
        ours = ancestors(os.getpid(), table) | {1}
        adopted = [entry.process for entry in table.values() if entry.parent in ours]
        known = {process: self._marks.get(process) for process in adopted}
        fresh = ((process, marks_of(process.pid)) for process, own in known.items() if own is None)
        found = {**known, **dict(fresh)}
        self._marks = {process: own for process, own in found.items() if own is not None}

    async def _keep_looking(self) -> None:
        while self._families:
            began = time.monotonic()
            self._look()
            await asyncio.sleep(max(_LOOK_S, 50 * (time.monotonic() - began)))
