"""A driver that is killed: it works through items, and writes each answer down as soon as it has it."""

import itertools
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import ray

from chaos.workers import Member, checksum
from raycrew.cluster_core import RayVirtualCluster
from raycrew.worker_groups import MultiWorkerFuture, RayWorkerGroup

ITEMS = 40
UNDER_WAY = 4


def writer(path: Path) -> Callable[[str], None]:
    """What appends a line to a file, and returns once it is on the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(line: str) -> None:
        os.write(descriptor, f"{line}\n".encode())
        os.fsync(descriptor)

    return write


def work(group: RayWorkerGroup, numbers: Iterable[int], write: Callable[[str], None]) -> None:
    """Have items answered; from the first on some are under way until the last one is sent."""
    load = np.arange(1 << 16, dtype=np.uint8)
    under_way: deque[tuple[int, MultiWorkerFuture[Any, Any]]] = deque()

    def take() -> None:
        number, future = under_way.popleft()
        ((item, value),) = future.get_results(timeout=60)
        write(f"answered {number} {item if value == checksum(load) else 'wrong'}")

    for number in numbers:
        write(f"sent {number}")
        under_way.append((number, group.call(Member.answer, str(number), load)))
        if len(under_way) > UNDER_WAY:
            take()
    while under_way:
        take()


def main(address: str, told: str, moment: str, slow_s: str) -> None:
    """Work; what to wait for before it is killed goes to the standard output, and that is what is slow."""
    slows = {"startup": "start_s", "shutdown": "linger_s"}
    slow: dict[str, Any] = {slows[moment]: float(slow_s)} if moment in slows else {}
    parent = os.getppid()
    endless = itertools.takewhile(lambda _: os.getppid() == parent, itertools.count())
    with ray.init(address, log_to_driver=False):
        _say("connected")
        with (
            RayVirtualCluster([1], use_gpus=False) as cluster,
            RayWorkerGroup(cluster, Member, record=f"{told}-record", **slow) as group,
        ):
            _say("started")
            work(group, endless if moment == "dispatch" else range(ITEMS), writer(Path(told)))
            _say("done")
            group.shutdown(cleanup_method="linger")


def _say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
