"""What ends what workers leave when the driver is killed, and its watches with it."""

import os
import re
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest
from patience import eventually, is_running

from raycrew.worker_groups._health import watches
from raycrew.worker_groups._on_nodes import marks
from raycrew.worker_groups._on_nodes.keeper import Keeper
from raycrew.worker_groups._on_nodes.limits import MemoryLimits
from raycrew.worker_groups._on_nodes.lookout import Lookout
from raycrew.worker_groups._on_nodes.process_table import read_entry

pytestmark = pytest.mark.hostile

SLEEP = "import time; time.sleep(3600)"
WORKER = f"""
    import subprocess, sys, time
    known = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True, env={{}})
    print(known.pid, flush=True)
    input()
    later = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
    print(later.pid, flush=True)
    time.sleep(3600)
"""


def keepers():
    """The processes of this process's keepers."""
    name = f"raycrew-keeper-of-{os.getpid()}"
    found = []
    for process in psutil.process_iter():
        try:
            if name in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


class Worker:
    """Starts a process without a mark, and one with it when it is told to."""

    def __init__(self, mark, errors):
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WORKER)],
            env={**os.environ, marks.VARIABLE: mark},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors.open("w"), text=True,
        )  # fmt: skip
        self.started = [self.read()]
        self.mark = mark

    def read(self):
        return int(self.process.stdout.readline())

    def start_another(self):
        print(file=self.process.stdin, flush=True)
        self.started.append(self.read())

    def end(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def worker(tmp_path):
    made = Worker(os.urandom(16).hex(), tmp_path / "errors")
    yield made
    made.end()
    for pid in filter(is_running, made.started):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def lookout(worker):
    made = Lookout()
    made.family(read_entry(worker.process.pid).process, worker.mark)
    made.look()
    return made


@pytest.fixture
def limits():
    return MemoryLimits()


def test_it_keeps_limits_of_memory_once_the_watch_is_gone(worker, lookout, limits, tmp_path):
    keeper, (root,) = Keeper(watches._sources()), lookout.families
    keeper.tell(lookout, limits)
    limits.set(root, 1)
    keeper.tell(lookout, limits)
    keeper.close()
    eventually(lambda: worker.process.poll() == -signal.SIGKILL, "the worker is ended for its memory")
    assert re.search(r"ended for its memory: it has \d+ bytes", (tmp_path / "errors").read_text())
    eventually(lambda: not any(map(is_running, worker.started)), "what it has started is gone")
    eventually(lambda: not keepers(), "the keeper is gone")


def test_it_ends_what_is_left_once_watch_and_worker_are_gone(worker, lookout, limits):
    keeper = Keeper(watches._sources())
    keeper.tell(lookout, limits)
    worker.start_another()  # the keeper is not told
    eventually(lambda: len(keepers()) == 1, "the keeper has started")
    keeper.close()
    worker.process.send_signal(signal.SIGSTOP)
    worker.process.send_signal(signal.SIGCONT)
    assert all(map(is_running, worker.started)), "a watch alone is gone, and the worker goes on"
    worker.end()
    eventually(lambda: not any(map(is_running, worker.started)), "what it has started is gone")
    eventually(lambda: not keepers(), "the keeper is gone")


def test_it_ends_itself_when_all_that_it_was_told_of_has_ended(worker, lookout, limits):
    keeper = Keeper(watches._sources())
    keeper.tell(lookout, limits)
    lookout.families.clear()
    keeper.tell(lookout, limits)
    keeper.close()
    eventually(lambda: not keepers(), "the keeper is gone")
    assert is_running(worker.process.pid)


def test_a_stopped_keeper_holds_nobody_up(worker, lookout, limits):
    keeper = Keeper(watches._sources())
    eventually(lambda: len(keepers()) == 1, "the keeper has started")
    [pid] = keepers()
    os.kill(pid, signal.SIGSTOP)
    [family] = lookout.families.values()
    members = set(family.members)
    for number in range(5000):
        family.members = {*members, read_entry(os.getpid()).process._replace(started=number)}
        told = keeper.tell(lookout, limits)
    assert not told, "it says so where the keeper does not listen"
    family.members = members
    os.kill(pid, signal.SIGCONT)
    eventually(
        lambda: keeper.tell(lookout, limits) or keeper._told[family.root] == (members, 0), "it listens again"
    )
    keeper.close()
    worker.end()
    eventually(lambda: not any(map(is_running, worker.started)), "what it has started is gone")


DRIVER = """
    import sys, time, ray
    from unwilling import Unwilling
    from raycrew.cluster_core import RayVirtualCluster
    from raycrew.worker_groups import RayWorkerGroup
    from raycrew.worker_groups._on_nodes import watch

    def start_late(sources, start=watch._started):
        time.sleep(late_s)
        return start(sources)

    late_s, watch._started = float(sys.argv[3]), start_late
    ray.init(address=sys.argv[1], log_to_driver=False)
    group = RayWorkerGroup(RayVirtualCluster([2], use_gpus=False), Unwilling)
    pids = group.call("pid").get_results() + group.call("start_session").get_results()
    for execute in (False, True):
        pids += group.call("start_daemon", sys.argv[2], execute=execute).get_results()
    print(*pids, flush=True)
    time.sleep(3600)
"""


@pytest.mark.parametrize("late_s", [0, pytest.param(5, marks=pytest.mark.long)])
def test_a_driver_killed_hard_leaves_nothing(local_ray, tmp_path, late_s):
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER), local_ray, str(tmp_path), str(late_s)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE, text=True,
    ) as driver:  # fmt: skip
        try:
            pids = [int(pid) for pid in driver.stdout.readline().split()]
            assert len(pids) == 8 and all(map(is_running, pids))
        finally:
            driver.kill()
    eventually(lambda: not [*filter(is_running, pids)], f"all that it has started is gone, of {pids}")
