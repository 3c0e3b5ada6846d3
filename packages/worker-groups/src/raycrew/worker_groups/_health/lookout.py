"""Looks at this node's process table, for all workers that somebody has to know of.

Standard library only: a node's watch is sent this module by value, whatever its environment has.
"""

import os

from raycrew.worker_groups._health.family import Family, Kin
from raycrew.worker_groups._health.marks import marks_of
from raycrew.worker_groups._health.process_table import Process, Table, ancestors, read_table


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
        known = {process: self._marks.get(process) for process in adopted}
        fresh = ((process, marks_of(process.pid)) for process, own in known.items() if own is None)
        found = {**known, **dict(fresh)}
        self._marks = {process: own for process, own in found.items() if own is not None}
