"""The cluster and the group that stand while faults go by."""

import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from ray.exceptions import RayError
from ray.util.placement_group import placement_group_table

from chaos.faults import Fault
from chaos.leaks import (
    Look,
    count_actors,
    count_others,
    leases_of,
    locks_of,
    orphans_of,
    run_processes,
    shared_files,
    shown,
)
from chaos.workers import Member, Trainer, checksum
from raycrew.cluster_core import ClusterError, RayVirtualCluster
from raycrew.cluster_core.testing import connected, simulated_nodes
from raycrew.tensor_transport import WeightDirectory, sync_weights
from raycrew.tensor_transport.testing import LocalPeers
from raycrew.tensor_transport.transports import SharedMemoryTransport
from raycrew.worker_groups import RayWorkerGroup, WorkerGroupError
from raycrew.worker_groups.testing import worker_processes

RANKS = 2
_REFUSALS = (WorkerGroupError, ClusterError, RayError)
# Pauses between restarts double: then the group is ended in order, and another one made.
RESTARTS = 4
_RESTARTED: Mapping[str, Any] = {
    "restart_on_failure": True,
    "max_restarts": 2 * RESTARTS,
    "idempotent_methods": ["answer", "pid", "master_port", "sleep", "wake", "awake"],
}
ARENAS = 2  # of one version of the weights
# For the standing group, a guest and who stands by it, another driver; what needs two goes to another node.
HEAD = {"num_cpus": RANKS + 3}


@dataclass
class Standing:
    """What stands.

    Attributes:
        run: What marks the processes of this run.
        nodes: Ray's cluster of made-up nodes.
        bundles: Where the standing group lives.
        guests: Room for one more worker, and one that stands by.
        directory: Where weights are announced.
        record: File with the items that ran and may run once only.
        shared: Folder of shared memory of this run.
        deadline_s: The longest that anything may take.
        folders: What is removed in the end.
    """

    run: str
    nodes: Any
    bundles: RayVirtualCluster
    guests: RayVirtualCluster
    directory: WeightDirectory
    record: Path
    shared: Path
    deadline_s: float
    folders: Sequence[Path]
    group: RayWorkerGroup = field(init=False)
    pids: list[int] = field(init=False)
    trainer: Trainer = field(init=False)
    before: Look = field(init=False)
    _has_sessions: bool = False
    _changes: int = 0  # generations of the group that no restart has made

    def __post_init__(self) -> None:
        self.trainer = Trainer(self.directory, str(self.shared))
        self.group = self._made()
        self.answers()
        self.before = self.look()

    def make(self, bundles: RayVirtualCluster, **options: Any) -> RayWorkerGroup:
        """A group of members."""
        return RayWorkerGroup(
            bundles,
            Member,
            record=str(self.record),
            init_timeout_s=self.deadline_s / 2,
            progress=False,
            **options,
        )

    def _made(self) -> RayWorkerGroup:
        return self.make(
            self.bundles,
            group="standing",
            directory=self.directory,
            shared=str(self.shared),
            enable_load_balancing=True,
            **_RESTARTED,
        )

    def guest(self, *, restarts: bool = False, **options: Any) -> RayWorkerGroup:
        """A group of one more worker, beside which there is room for somebody who stands by."""
        more = _RESTARTED if restarts else {}
        return self.make(self.guests, workers_per_node=1, group="guest", **more, **options)

    def renew_if_worn(self, fault: Fault) -> None:
        """Another group where this one would be restarted too often; other generations cost it nothing."""
        if self.group.generation - self._changes + fault.restarts > RESTARTS:
            self.renew()

    def renew(self) -> None:
        """Another group, whatever became of this one."""
        self.group.shutdown(force=True)
        self.group, self._changes = self._made(), 0
        self.answers()

    def pid_of(self, rank: int) -> int:
        """The process that was a rank when all answered."""
        return self.pids[rank]

    def victim(self, fault: Fault) -> int:
        """The process that is to be disturbed."""
        return self.pid_of(fault.victim % RANKS)

    def answers(self) -> None:
        """Return once all ranks answer rightly."""
        load = np.arange(64, dtype=np.uint8)
        future = self.group.call(Member.answer, "probe", load)
        if future.get_results(timeout=self.deadline_s) != [("probe", checksum(load))] * RANKS:
            raise RuntimeError("the group answers wrongly")
        self.pids = self.group.call(Member.pid).get_results(timeout=self.deadline_s)

    def resize(self, n: int) -> None:
        """Give the group so many workers; what a worker that dies meanwhile makes fail is tried again."""
        until = time.monotonic() + self.deadline_s
        while self.group.world_size != n:
            try:
                self.group.resize(n, timeout=self.deadline_s)
                self._changes += 1
            except _REFUSALS:
                if time.monotonic() >= until:
                    raise
                with contextlib.suppress(*_REFUSALS):  # one that stays may be dead
                    self.group.restart_failed_workers()

    def renew_rendezvous(self) -> None:
        """Have the group meet elsewhere."""
        self.group.renew_rendezvous()
        self._changes += 1

    def come_and_go(self, until: Callable[[], bool]) -> None:
        """Take all workers but one away, and have them again, once and until something is so."""
        self.resize(1)
        self.resize(RANKS)
        while not until():
            self.resize(1)
            self.resize(RANKS)

    def ours(self) -> set[int]:
        """Workers of this run, and what they have started."""
        return worker_processes().keys() & run_processes(self.run).keys()

    @property
    def update_s(self) -> float:
        """The longest that an update may take."""
        return self.deadline_s / 2

    def sync(self) -> int:
        """Bring all ranks to new weights."""
        done = sync_weights(
            LocalPeers([self.trainer]),
            self.group,
            directory=self.directory,
            prepare="prepare_weights",
            timeout_s=self.update_s,
        )
        return int(done.version)

    def expect_sessions(self) -> None:
        """From now on each rank has a session of shared memory, and the trainer arenas for a version or two.

        Arenas are kept to be used again: a version that was given up may leave some, and no later one more.
        """
        if not self._has_sessions:
            now = self.look()
            self.before = replace(self.before, shared=now.shared + ARENAS, locks=now.locks)
            self._has_sessions = True

    def look(self) -> Look:
        """What there is now, but for what the next start of a session removes."""
        SharedMemoryTransport(directory=self.shared).close()
        commands = run_processes(self.run)
        marked = {pid: marks for pid, marks in worker_processes().items() if pid in commands}
        groups = {name for name, entry in placement_group_table().items() if entry["state"] != "REMOVED"}
        return Look(
            tuple(f"{pid}: {shown(commands[pid])}" for pid in orphans_of(marked, self.pids)),
            count_actors(commands.values()),
            count_others(commands, marked),
            frozenset(groups),
            shared_files(self.shared),
            leases_of(commands),
            locks_of(commands.keys()),
        )

    def ran(self) -> Mapping[str, int]:
        """How often each item ran that may run once only."""
        return Counter(self.record.read_text().splitlines()) if self.record.exists() else {}


@contextlib.contextmanager
def standing(run: str, folder: Path, deadline_s: float) -> Iterator[Standing]:
    """A small cluster with a group on it; both end with the block."""
    given = os.environ.get("RAY_TMPDIR")
    with (
        _settings(),
        _shared_folder() as shared,
        simulated_nodes([HEAD]) as nodes,
        connected(nodes.address),
        RayVirtualCluster([RANKS], use_gpus=False) as bundles,
        RayVirtualCluster([2], use_gpus=False) as guests,
        WeightDirectory.start() as directory,
    ):
        folders = [shared, folder, *([] if given else [Path(os.environ["RAY_TMPDIR"])])]
        record = folder / "record"
        made = Standing(run, nodes, bundles, guests, directory, record, shared, deadline_s, folders)
        try:
            yield made
        finally:
            made.trainer.close()
            made.group.shutdown(force=True)


@contextlib.contextmanager
def _shared_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="raycrew-chaos-", dir="/dev/shm") as folder:
        yield Path(folder)


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Ray's workers find this folder."""
    here = str(Path(__file__).parents[1])
    before = os.environ.get("PYTHONPATH")
    found = [here, *filter(None, (before or "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(found))
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
