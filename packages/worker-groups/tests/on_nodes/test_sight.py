"""What is seen of a worker with all that it has started."""

import subprocess
import sys

from raycrew.worker_groups._on_nodes.family import Family
from raycrew.worker_groups._on_nodes.process_table import own_process, read_entry
from raycrew.worker_groups._on_nodes.sight import Sights

SIZE = 24 << 20


def test_the_memory_of_what_a_worker_has_started_is_told_apart_from_its_own():
    worker, sights = own_process(), Sights()
    family = Family(worker, "0" * 32)
    assert sights.of(worker, family)["started_bytes"] == 0
    code = f"memory = b'x' * {SIZE}; print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "ready\n"
        family.members.add(read_entry(child.pid).process)
        seen = sights.of(worker, family)
        assert SIZE < seen["started_bytes"] < 3 * SIZE
        assert seen["n_processes"] == 2
        child.stdin.close()
    assert sights.of(worker, family)["started_bytes"] == 0, "it has ended, and the table was not read since"
