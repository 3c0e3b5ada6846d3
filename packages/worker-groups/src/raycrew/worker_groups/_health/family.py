"""A worker's process and all that it has started, remembered after their parents are gone.

Standard library only: a node's watch is sent this module by value, whatever its environment has.
"""

from collections.abc import Mapping

from raycrew.worker_groups._health.process_table import Process, Table


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

    def update(self, table: Table, marks: Mapping[Process, frozenset[str]]) -> None:
        """Take in a new look at the table; members that are no longer there are forgotten.

        Args:
            table: The processes that are there.
            marks: What those carry whose parent may have died; all others are found through their parents.
        """
        there = {entry.process for entry in table.values()}
        used = {number for entry in table.values() for number in (entry.session, entry.group)}
        members = (self.members & there) | {process for process, own in marks.items() if self.mark in own}
        led = {n for n in self._led & used if n not in table or table[n].process in members}
        while True:
            pids = {member.pid for member in members}
            led |= {pid for pid in pids if pid in (table[pid].session, table[pid].group)}
            found = {
                entry.process
                for entry in table.values()
                if entry.parent in pids or entry.session in led or entry.group in led
            }
            if found <= members:
                break
            members |= found
        self.members, self._led = members, led
