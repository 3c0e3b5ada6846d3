"""A driver that is killed: it works through items, and writes each answer down as soon as it has it."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import ray

from chaos.workers import Member, checksum
from raycrew.cluster_core import RayVirtualCluster
from raycrew.worker_groups import RayWorkerGroup

ITEMS = 40


def writer(path: Path) -> Callable[[str], None]:
    """What appends a line to a file, and returns once it is on the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(line: str) -> None:
        os.write(descriptor, f"{line}\n".encode())
        os.fsync(descriptor)

    return write


def main(address: str, told: str) -> None:
    """Work; what to wait for before it is killed goes to the standard output."""
    write, load = writer(Path(told)), np.arange(1 << 16, dtype=np.uint8)
    with ray.init(address, log_to_driver=False):
        sys.stdout.write("connected\n")
        sys.stdout.flush()
        with (
            RayVirtualCluster([1], use_gpus=False) as cluster,
            RayWorkerGroup(cluster, Member, record=f"{told}-record") as group,
        ):
            sys.stdout.write("started\n")
            sys.stdout.flush()
            for number in range(ITEMS):
                write(f"sent {number}")
                ((item, value),) = group.call(Member.answer, str(number), load).get_results(timeout=60)
                write(f"answered {number} {item if value == checksum(load) else 'wrong'}")
            sys.stdout.write("done\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
