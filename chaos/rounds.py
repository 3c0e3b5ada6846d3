"""Rounds against the standing group: work is under way, and the fault happens meanwhile."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import ray

from chaos import guests
from chaos.items import Work, taken
from chaos.playing import Disturb, Round
from chaos.standing import RANKS, Standing
from chaos.strike import kill, slow_down, stop
from chaos.workers import Member
from raycrew.tensor_transport import TransportError
from raycrew.worker_groups import WorkerFailureError

FILLING = [4 << 20] * 24  # more than the object store of a made-up node holds


def killed_worker(this: Round) -> None:
    """A worker is killed."""
    _of_worker(this, kill)


def stopped_worker(this: Round) -> None:
    """A worker is stopped, and goes on later."""
    _of_worker(this, partial(stop, lasts_s=this.fault.lasts_s))


def slow_worker(this: Round) -> None:
    """A worker gets a part of its time only."""
    _of_worker(this, partial(slow_down, lasts_s=this.fault.lasts_s))


def stopped_service(this: Round) -> None:
    """Ray's control service answers nobody for some time."""
    (server,) = this.stands.nodes.head_node.all_processes["gcs_server"]
    _of_worker(this, lambda _: stop(server.process.pid, this.fault.lasts_s))


def _of_worker(this: Round, disturb: Disturb) -> None:
    moments = {
        "startup": guests.startup,
        "update": _update,
        "resize": _resize,
        "takeover": guests.takeover,
        "turns": guests.turns,
        "shutdown": guests.shutdown,
    }
    moments.get(this.fault.moment, _calls)(this, disturb)


def _calls(this: Round, disturb: Disturb) -> None:
    stands, work = this.stands, Work(this.book)
    work.send(this.fault, stands.group)
    with this.striking(lambda: disturb(stands.victim(this.fault))) as strike:
        work.keep_on(this.fault, stands.group, lambda: strike.began > 0, stands.deadline_s)
        work.send(this.fault, stands.group)
    work.collect(stands.deadline_s)


def _update(this: Round, disturb: Disturb) -> None:
    stands = this.stands
    stands.sync()
    stands.expect_sessions()
    with this.striking(lambda: disturb(stands.victim(this.fault))):
        sync_or_fail(stands, this.fault.lasts_s)
    this.book.send(this.item, [], again=True)
    with taken(this.book, this.item) as answer:
        stands.answers()
        during = set(_served(stands)) - {"none"}
        last = stands.sync()
        after = _served(stands)
        answer.value = [
            *([f"served {sorted(during)}"] if len(during) > 1 or "mixed" in during else []),
            *([f"served {after}, not {last}"] if after != [str(last)] * RANKS else []),
        ]


def _resize(this: Round, disturb: Disturb) -> None:
    """Workers come and go, and items are for whoever is there: in a stream, and one by one."""
    stands, work = this.stands, Work(this.book)

    def strike() -> None:
        there = sorted(stands.ours())
        disturb(there[this.fault.victim % len(there)])

    with this.striking(strike) as strike_, ThreadPoolExecutor(1) as beside:
        changes = beside.submit(stands.come_and_go, lambda: strike_.done)
        work.balance(this.fault, stands.group, changes.done, stands.deadline_s)
        changes.result()


def sync_or_fail(stands: Standing, lasts_s: float) -> None:
    """An update that a fault may make fail; only one that lasts as long may make it hang for all of its time.

    Args:
        stands: What is updated.
        lasts_s: How long the fault lasts.

    Raises:
        Exception: The update's own, where it was given up as time was up.
    """
    began = time.monotonic()
    try:
        stands.sync()
    except (WorkerFailureError, TransportError) as error:
        hung = time.monotonic() - began >= stands.update_s or _is_late(error)
        if hung and lasts_s < stands.update_s:
            raise


def _is_late(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, TimeoutError):
        error = error.__cause__
    return error is not None


def _served(stands: Standing) -> list[str]:
    """The version that each rank serves, "none", or "mixed" where its weights are of several."""
    return [_version(stands, rank) for rank in range(RANKS)]


def _version(stands: Standing, rank: int) -> str:
    future = stands.group.on(ranks=[rank]).call(Member.serve)
    try:
        ((version, values),) = future.get_results(timeout=stands.deadline_s)
    except WorkerFailureError as error:
        if "holds no version" not in str(error):
            raise
        return "none"
    return str(version) if len(values) == 1 else "mixed"


def flapping_worker(this: Round) -> None:
    """A worker is killed, and so is the one that takes its place."""
    stands, work = this.stands, Work(this.book)
    first = stands.victim(this.fault)

    def twice() -> None:
        known = stands.ours()
        kill(first)
        again = guests.fresh(stands, known, stands.deadline_s / 3)
        kill(again)
        this.notes.append(f"killed {first}, and {again} in its place")

    work.send(this.fault, stands.group)
    with this.striking(twice) as strike:
        # As long as that takes: a death that no call fails of is not noticed, and nobody takes the place.
        work.keep_on(this.fault, stands.group, lambda: strike.done, stands.deadline_s)
    work.collect(stands.deadline_s)
    stands.answers()
    this.notes.append(f"now it is {stands.victim(this.fault)}")


def stolen_port(this: Round) -> None:
    """Somebody else listens where the group is to meet; its next rendezvous is elsewhere."""
    stands, later = this.stands, f"{this.item}-later"
    (port,) = stands.group.on(ranks=[0]).call(Member.master_port).get_results(timeout=stands.deadline_s)
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", port))
        thief.listen()
        this.began = time.monotonic()
        this.book.send(this.item, "refused", again=False)
        with taken(this.book, this.item) as answer:
            answer.value = _host(stands, this.item)
        this.book.send(later, True, again=False)
        with taken(this.book, later) as answer:
            stands.renew_rendezvous()
            answer.value = _host(stands, later) != port


def _host(stands: Standing, item: str) -> int:
    future = stands.group.on(ranks=[0]).call(Member.host, item)
    return int(future.get_results(timeout=stands.deadline_s)[0][1])


def full_object_store(this: Round) -> None:
    """Calls go on while the store has no room left."""
    this.began, work = time.monotonic(), Work(this.book)
    kept = [ray.put(np.zeros(size, np.uint8)) for size in FILLING]
    held = ray.get(kept, timeout=this.stands.deadline_s)
    work.send(this.fault, this.stands.group)
    work.collect(this.stands.deadline_s)
    del held, kept
