"""What a node's watch sees of one worker: its process, its page, what it uses.

Standard library only: a node's watch is sent this module by value, whatever its environment has.
"""

import os
import time
from collections.abc import Mapping
from typing import Any

from raycrew.worker_groups._on_nodes.family import Family
from raycrew.worker_groups._on_nodes.leavings import output_paths
from raycrew.worker_groups._on_nodes.page import open_page, open_ring, read
from raycrew.worker_groups._on_nodes.process_table import (
    Process,
    Table,
    clock_name,
    memory_of,
    read_entry,
    runs,
)
from raycrew.worker_groups._on_nodes.ring import Ring

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SPAN_S = 0.5  # CPU use is told of no shorter time
_WANTED_S = 15.0  # a worker notes its calls for so long, unless they are asked for again

#: What this node's clock is called, what it shows, how many calls a worker had noted of those that were seen
#: and now, and those noted since, for `notes_in`.
Ran = tuple[str, float, int, int, bytes]


class Sights:
    """Of all workers that a watch knows."""

    def __init__(self) -> None:
        self._pages: dict[Process, memoryview] = {}
        self._spent: dict[Process, tuple[float, float]] = {}
        self._use: dict[Process, float] = {}
        self._rings: dict[Process, Ring] = {}
        self._outputs: dict[Process, tuple[str, ...]] = {}

    def open(self, worker: Process, mark: str) -> None:
        """Open a worker's page and ring, and see where its output goes: that stays, whatever it closes."""
        page = None if worker in self._pages else open_page(worker.pid, mark)
        if page is not None:
            self._pages[worker] = page
        ring = None if worker in self._rings else open_ring(worker.pid, mark)
        if ring is not None:
            self._rings[worker] = ring
        if worker not in self._outputs and (paths := output_paths(worker.pid)) and runs(worker):
            self._outputs[worker] = paths

    def outputs(self, worker: Process) -> tuple[str, ...]:
        """Files that a worker's output goes to, or went to, as far as that was seen."""
        return self._outputs.get(worker, ())

    def forget(self, worker: Process) -> None:
        """Let go of what is known of a worker."""
        for known in (self._pages, self._spent, self._use, self._rings, self._outputs):
            known.pop(worker, None)

    def take_in(self, families: Mapping[Process, Family], table: Table) -> None:
        """Learn from a look at the table what workers have used since the last one."""
        now = time.monotonic()
        for worker, family in families.items():
            at, before = self._spent.get(worker, (0.0, 0.0))
            if now - at < _SPAN_S:
                continue
            ticks = sum(table[member.pid].ticks for member in family.members if member.pid in table)
            spent = ticks / _TICKS_PER_S
            if at:
                self._use[worker] = max(0.0, spent - before) / (now - at)
            self._spent[worker] = (now, spent)

    def record(
        self, worker: Process, mark: str, seen: int | None = None, *, is_last: bool = False
    ) -> Ran | str | None:
        """The calls that a worker, dead or alive, has noted after the first so many; has it note the next.

        The last time, the worker is left to stop by itself: another driver may have it note calls, too.
        None of those before where None were seen. Where there is no ring, why; None of a worker that is gone,
        once all that it has noted was told.
        """
        self.open(worker, mark)
        ring, now, is_there = self._rings.get(worker), time.monotonic(), runs(worker)
        if ring is None:
            return "what it notes of its calls can't be opened" if is_there else None
        if not is_there and seen == ring.count:
            return None
        if not is_last:
            ring.want(max(ring.wanted, now + _WANTED_S))
        count, data = ring.since(seen) if seen is not None else (ring.count, b"")
        return clock_name(), now, count if seen is None else seen, count, data

    def of_gone(self, worker: Process) -> dict[str, Any]:
        """What is still to be seen of a worker whose process is gone: what it was in when it died."""
        return {**on_page(self._pages.get(worker)), "is_alive": False}

    def of(self, worker: Process, family: Family) -> dict[str, Any]:
        """What is to be seen of a worker at this moment; the fields of `Seen`."""
        entry = read_entry(worker.pid)
        if entry is None or entry.process != worker:
            return self.of_gone(worker)
        memory = memory_of(worker.pid)
        return {
            "is_alive": True,
            "is_stopped": entry.state in "Tt",
            "private_bytes": memory.get("RssAnon"),
            "resident_bytes": memory.get("VmRSS"),
            "cpu": self._use.get(worker),
            "n_processes": len(family.members),
            "started_bytes": sum(
                memory_of(member.pid).get("RssAnon", 0) for member in family.members if member != worker
            ),
            **on_page(self._pages.get(worker)),
        }


def on_page(page: memoryview | None) -> dict[str, Any]:
    """What a worker's page says, with ages in place of times."""
    if page is None:
        return {}
    reading, now = read(page), time.monotonic()
    running = [call for call in reading.calls if not call.ended]
    return {
        "beat_age_s": max(0.0, now - reading.beat) if reading.beat else None,
        "device_bytes": reading.device_bytes,
        "calls": [(c.method, c.number, max(0.0, now - c.began), max(0.0, now - c.ticked)) for c in running],
        "is_told": True,
    }
