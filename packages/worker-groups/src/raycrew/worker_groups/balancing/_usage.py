"""Resource use of workers, asked on their nodes without waiting for the answer."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
from ray.exceptions import RayError

from raycrew.worker_groups._ray import current_session, run_on_node


class ProcessUsage:
    """CPU use of processes and all their descendants; 1 is one busy core.

    Each call starts a small task on each node, in a process that is idle there, and gives what the tasks of
    earlier calls have said: it waits for nothing, and is as old as the last call.

    Args:
        processes: Node id and process id by rank.
    """

    def __init__(self, processes: Mapping[int, tuple[str, int]]) -> None:
        self._by_node: dict[str, dict[int, int]] = {}
        for rank, (node_id, pid) in processes.items():
            self._by_node.setdefault(node_id, {})[pid] = rank
        self._asked: dict[Any, str] = {}
        self._samples: dict[int, tuple[float, float]] = {}
        self._usage: dict[int, float] = {}

    def __call__(self) -> Mapping[int, float]:
        """CPU use by rank, of those that have been seen twice."""
        if self._asked:
            done, _ = current_session().wait(list(self._asked), num_returns=len(self._asked), timeout=0)
            for ref in done:
                self._take_in(self._asked.pop(ref), ref)
        asked = set(self._asked.values())
        for node_id, ranks in self._by_node.items():
            if node_id not in asked:
                ref = run_on_node(cpu_seconds, [list(ranks)], node_id=node_id, own_process=False)
                self._asked[ref] = node_id
        return dict(self._usage)

    def _take_in(self, node_id: str, ref: Any) -> None:
        try:
            at, spent = current_session().get(ref)
        except RayError:  # the node is lost: its ranks no longer report
            for rank in self._by_node[node_id].values():
                self._usage.pop(rank, None)
            return
        for pid, rank in self._by_node[node_id].items():
            if pid not in spent:
                self._usage.pop(rank, None)
                continue
            seconds = spent[pid]
            before_at, before = self._samples.get(rank, (at, seconds))
            if at > before_at:
                self._usage[rank] = max(0.0, seconds - before) / (at - before_at)
            self._samples[rank] = (at, seconds)


def cpu_seconds(pids: Sequence[int]) -> tuple[float, dict[int, float]]:
    """The monotonic clock, and the CPU time that each living process and its descendants have used."""
    spent = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            family = [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        spent[pid] = sum(map(_own_seconds, family))
    return time.monotonic(), spent


def _own_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)
