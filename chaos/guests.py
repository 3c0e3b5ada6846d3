"""Rounds with a guest, a group beside the standing one, that starts, ends, takes turns, or is stood by."""

import time
from collections.abc import Collection
from contextlib import suppress

import numpy as np

from chaos.items import Work, taken
from chaos.playing import Disturb, Round
from chaos.standing import RANKS, Standing
from chaos.strike import MissedError, kill, wait_for
from chaos.workers import Member, signs_of
from raycrew.worker_groups import PhaseManager, RayWorkerGroup


def startup(this: Round, disturb: Disturb) -> None:
    """The guest starts."""
    stands, known = this.stands, this.stands.ours()

    def strike() -> None:
        new = fresh(stands, known, stands.deadline_s / 2)
        time.sleep(this.fault.delay_s)
        disturb(new)

    this.book.send(this.item, 1, again=False)
    with this.striking(strike, delay_s=0.0), taken(this.book, this.item) as answer:
        with stands.guest(start_s=this.slow_s) as guest:
            one = np.zeros(1, np.uint8)
            guest.call(Member.once, this.item, one).get_results(timeout=stands.deadline_s)
        answer.value = _ended(this, guest)


def fresh(stands: Standing, known: Collection[int], timeout_s: float) -> int:
    """A worker that was not there before, as soon as there is one."""
    return wait_for("a new worker", lambda: next(iter(stands.ours().difference(known)), None), timeout_s)


def shutdown(this: Round, disturb: Disturb) -> None:
    """The guest ends."""
    guest = this.stands.guest(linger_s=this.slow_s)
    pid = _pid_of(this.stands, guest)
    this.book.send(this.item, 1, again=True)
    with this.striking(lambda: disturb(pid)), taken(this.book, this.item) as answer:
        guest.shutdown(cleanup_method="linger", timeout=10)
        answer.value = _ended(this, guest)


def _pid_of(stands: Standing, guest: RayWorkerGroup) -> int:
    return int(guest.call(Member.pid).get_results(timeout=stands.deadline_s)[0])


def _ended(this: Round, guest: RayWorkerGroup) -> int:
    """How many workers of a group have ended, as it says itself."""
    if guest.unended:
        this.notes.append(f"not seen to end: {guest.unended}")
    return guest.world_size - len(guest.unended)


def takeover(this: Round, disturb: Disturb) -> None:
    """Who stands by takes the place of the guest's worker; every other time it is disturbed on its way."""
    stands, work, known = this.stands, Work(this.book, ranks=1), this.stands.ours()
    with stands.guest(standby=1, restarts=True) as guest:
        first = _pid_of(stands, guest)
        second = fresh(stands, {*known, first}, stands.deadline_s / 2)

        def strike() -> None:
            if this.fault.victim % 2 == 0:
                disturb(first)
            else:
                kill(first)
                with suppress(MissedError):  # who has not got ready to stand by in time is not kept
                    disturb(second)

        with this.striking(strike) as strike_:
            work.keep_on(this.fault, guest, lambda: strike_.done, stands.deadline_s)
            work.send(this.fault, guest)
        work.collect(stands.deadline_s)


def turns(this: Round, disturb: Disturb) -> None:
    """The guest and the standing group are awake in turns, and never both."""
    stands = this.stands
    for sign in signs_of(stands.record).glob("*"):
        sign.unlink()
    phases = PhaseManager("standing", "guest", timeout_s=stands.deadline_s, look_s=None)
    _join(phases, "standing", stands.group)
    with stands.guest(restarts=True) as guest:
        _join(phases, "guest", guest)
        groups, pids = {"standing": stands.group, "guest": guest}, [*stands.pids, _pid_of(stands, guest)]
        with this.striking(lambda: disturb(pids[this.fault.victim % len(pids)])) as strike:
            while not strike.done:
                for name in groups:
                    _take_turn(this, phases, name, groups[name])
        for name, ranks in (("standing", RANKS), ("guest", 1)):
            _take_turn(this, phases, name, groups[name], awake=[f"{name} {rank}" for rank in range(ranks)])


def _join(phases: PhaseManager, name: str, group: RayWorkerGroup) -> None:
    with phases.turn(name):
        group.call(Member.wake).get_results()
        phases.add(name, group)


def _take_turn(
    this: Round, phases: PhaseManager, name: str, group: RayWorkerGroup, awake: list[str] | None = None
) -> None:
    """Have an item answered in a group's turn; by default it may be that not all of the group are awake."""
    item = f"{this.item}-{this.book.sent}"
    this.book.send(item, awake or [], again=True)
    with taken(this.book, item) as answer, phases.turn(name):
        future = group.on(ranks=[0]).call(Member.awake, item)
        ((_, seen),) = future.get_results(timeout=this.stands.deadline_s)
        answer.value = seen if awake else [sign for sign in seen if not sign.startswith(name)]
