"""A worker's process and all that it has started, remembered after their parents are gone.

Standard library only: a node's watch is sent this module by value, whatever its environment has.
"""

from collections.abc import Collection, Mapping

from raycrew.worker_groups._on_nodes.process_table import Process, Table


class Kin:
    """Who is related to whom in one look at the table, found out once for all families.

    Attributes:
        table: The look.
        there: All processes in it.
        used: Numbers of their sessions and process groups.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.there = {entry.process for entry in table.values()}
        self._children: dict[int, set[Process]] = {}
        self._following: dict[int, set[Process]] = {}  # by session and process group
        for entry in table.values():
            self._children.setdefault(entry.parent, set()).add(entry.process)
            self._following.setdefault(entry.session, set()).add(entry.process)
            self._following.setdefault(entry.group, set()).add(entry.process)
        self.used = self._following.keys()

    def of(self, parents: Collection[int], leaders: Collection[int]) -> set[Process]:
        """Children of some processes, and whoever is in the sessions and process groups of some."""
        found = [self._children.get(pid, set()) for pid in parents]
        return set().union(*found, *(self._following.get(pid, set()) for pid in leaders))


class Family:
    """The living processes of one worker.

    Args:
        root: The worker's own process.
        mark: What its descendants carry.
    """

    def __init__(self, root: Process, mark: str) -> None:
        self.root = root
        self.mark = mark
        self.members = {root}
        self._led: set[int] = set()  # Sessions and process groups that members lead, or led.

    def update(self, kin: Kin, marks: Mapping[Process, frozenset[str]]) -> None:
        """Take in a new look at the table; members that are no longer there are forgotten.

        Args:
            kin: The processes that are there.
            marks: What those carry whose parent may have died; all others are found through their parents.
        """
        table = kin.table
        members = (self.members & kin.there) | {process for process, own in marks.items() if self.mark in own}
        led = {n for n in self._led & kin.used if n not in table or table[n].process in members}
        while True:
            pids = {member.pid for member in members}
            led |= {pid for pid in pids if pid in (table[pid].session, table[pid].group)}
            found = kin.of(pids, led)
            if found <= members:
                break
            members |= found
        self.members, self._led = members, led
