"""Looks at this node's process table, for all workers that somebody has to know of.

Standard library only: a node's watch is sent this module by value, whatever its environment has.
"""

import os
import time

from raycrew.worker_groups._on_nodes.family import Family, Kin
from raycrew.worker_groups._on_nodes.marks import marks_of
from raycrew.worker_groups._on_nodes.process_table import Process, Table, ancestors, read_table, runs

_YOUNG_S = 2.0
_BEING_EXECUTED_S = 0.1  # at most, for a process that has no marks to be read yet


class Lookout:
    """Knows the families of some workers.

    Attributes:
        families: By the workers' own processes.
    """

    def __init__(self) -> None:
        self.families: dict[Process, Family] = {}
        self._marks: dict[Process, frozenset[str]] = {}

    def family(self, root: Process, mark: str) -> Family:
        """The family of a worker, which is known from now on."""
        return self.families.setdefault(root, Family(root, mark))

    def look(self) -> Table:
        """Take in what the table shows now, and give it."""
        table = read_table()
        self._read_marks(table)
        kin = Kin(table)
        for family in self.families.values():
            family.update(kin, self._marks)
        return table

    def _read_marks(self, table: Table) -> None:
        """Of each process once, and only of those whose parent may have been another.

        What has lost its parent is a child of one of this process's ancestors, for they are the workers' too.
        """
        ours = ancestors(os.getpid(), table) | {1}
        adopted = [entry.process for entry in table.values() if entry.parent in ours]
        known = {process: own for process in adopted if (own := self._marks.get(process)) is not None}
        found = {process: marks_of(process.pid) for process in adopted if process not in known}
        due = time.monotonic() + _BEING_EXECUTED_S
        while young := [process for process, own in found.items() if own is None and _is_young(process)]:
            if time.monotonic() >= due:
                break
            time.sleep(_BEING_EXECUTED_S / 50)
            found |= {process: marks_of(process.pid) for process in young}
        self._marks = known | {process: own for process, own in found.items() if own is not None}


def _is_young(process: Process) -> bool:
    """Whether it may be executing a program just now, and still be there."""
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - process.started / os.sysconf("SC_CLK_TCK")
    return age_s < _YOUNG_S and runs(process)
