"""Rounds beside the standing group: nodes, drivers and mounts of their own."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from chaos import rounds
from chaos.items import Work, taken
from chaos.mounts import tried
from chaos.playing import Round
from chaos.standing import RANKS
from chaos.strike import wait_for
from raycrew.cluster_core import RayVirtualCluster

ITEM_S = 0.05
_TOLD = {"startup": "connected", "dispatch": "started", "shutdown": "done"}


def killed_node(this: Round) -> None:
    """A node dies with a group on it, in the midst of its items; the standing group does not notice."""

    def kill(node: Any) -> None:
        this.stands.nodes.remove_node(node, allow_graceful=False)
        wait_for("an item that failed", lambda: this.book.failures or None, this.stands.deadline_s / 2)

    _with_a_node(this, kill, is_gone=True)


def drained_node(this: Round) -> None:
    """A node is to be taken back with a group on it, which goes on until then."""
    _with_a_node(this, lambda node: _drain(this.stands.nodes.address, node.node_id))


def _with_a_node(this: Round, disturb: Callable[[Any], object], *, is_gone: bool = False) -> None:
    stands, work = this.stands, Work(this.book)
    node = stands.nodes.add_node(num_cpus=RANKS, object_store_memory=80 << 20)
    try:
        with RayVirtualCluster([RANKS], use_gpus=False) as there, stands.make(there, item_s=ITEM_S) as group:
            with this.striking(lambda: disturb(node)) as strike:
                work.keep_on(this.fault, group, lambda: strike.done, stands.deadline_s)
            work.collect(stands.deadline_s)
            this.book.may_fail = False
            work.send(this.fault, stands.group)
            work.collect(stands.deadline_s)
            this.book.send(this.item, [], again=True)
            with taken(this.book, this.item) as answer:
                group.shutdown()
                # Of workers whose node is gone nobody can see the end, which the group has to say.
                known = f"its node {node.node_id} is gone" if is_gone else None
                answer.value = [why for why in group.unended.values() if why != known]
    finally:
        if node in stands.nodes.list_all_nodes():
            stands.nodes.remove_node(node, allow_graceful=False)


def _drain(address: str, node_id: str) -> None:
    reason = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "chaos")
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "drain-node", "--address", address, "--node-id", node_id, *reason]
    subprocess.run(
        [*command, "--deadline-remaining-seconds", "600"], check=True, capture_output=True, timeout=60
    )


def killed_driver(this: Round) -> None:
    """A driver dies; what it wrote down counts, and what it owned is lost by Ray's design."""
    stands = this.stands
    told = stands.record.with_name(f"driver-{this.fault.number}")
    how = (stands.nodes.address, str(told), this.fault.moment, str(this.slow_s))
    command = [sys.executable, "-m", "chaos.driver", *how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        try:
            _read_until(driver, _TOLD[this.fault.moment])
            with this.striking(driver.kill):
                driver.wait(stands.deadline_s)
        finally:
            driver.kill()
    if driver.returncode != -signal.SIGKILL:
        this.missed = f"the driver had ended before, with {driver.returncode}"
    words = [line.split() for line in (told.read_text().splitlines() if told.exists() else ())]
    sent = {item for verb, item, *_ in words if verb == "sent"}
    for verb, item, *value in words:
        if verb == "answered":
            this.book.send(f"{this.item}-{item}", [item], again=True)
            this.book.answer(f"{this.item}-{item}", value)
            sent.discard(item)
    this.by_design = len(sent)
    if this.fault.moment == "dispatch" and not sent:
        this.missed = "no item was under way"


def _read_until(driver: "subprocess.Popen[str]", word: str) -> None:
    if driver.stdout is not None:
        for line in driver.stdout:
            if line.strip() == word:
                return
    raise RuntimeError(f"the driver ended before it was {word}")


def on_mount(this: Round) -> None:
    """Something is full: in a process that sees it mounted, and nobody else."""
    this.began = time.monotonic()
    said = tried(this.fault.kind, this.stands.record.parent, this.stands.deadline_s)
    this.book.send(this.item, "as promised", again=True)
    this.book.answer(this.item, said)


ROUNDS: Mapping[str, Callable[[Round], None]] = {
    "killed worker": rounds.killed_worker,
    "stopped worker": rounds.stopped_worker,
    "slow worker": rounds.slow_worker,
    "flapping worker": rounds.flapping_worker,
    "stolen port": rounds.stolen_port,
    "full object store": rounds.full_object_store,
    "stopped control service": rounds.stopped_service,
    "killed node": killed_node,
    "drained node": drained_node,
    "killed driver": killed_driver,
    "full shared memory": on_mount,
    "full disk": on_mount,
}
