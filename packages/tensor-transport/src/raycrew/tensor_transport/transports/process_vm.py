"""Bytes read straight out of another process's memory, by `process_vm_readv`."""

import errno
import secrets
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raycrew.tensor_transport.errors import ShardError, TransportError
from raycrew.tensor_transport.protocols import Bytes
from raycrew.tensor_transport.transports._choosing import no_process_vm, this_process
from raycrew.tensor_transport.transports._interface import Buffer, Capabilities, Guard, Offer, Owner
from raycrew.tensor_transport.transports._native import readv
from raycrew.tensor_transport.transports._pulling import (
    Job,
    Puller,
    check_here,
    gone,
    is_alive,
    lost,
    source_bytes,
)

_TABLE = 4096
_SMALL = 64 << 10


class _Key(NamedTuple):
    """Where bytes lie in their owner, and the mark that stands at another place for as long as they do."""

    address: int
    size_bytes: int
    mark_address: int
    mark: int


class ProcessVmTransport(Puller):
    """Offers lend memory, which readers of the same user and machine copy without any help of the owner.

    For each offer a random mark stands in the owner's memory until it is withdrawn. It is read before and
    after the bytes, and then the time at which the process was started: neither a reused pid nor memory that
    is used anew gives wrong bytes. Memory in huge pages is read fastest: numpy asks for them for large
    arrays.
    """

    name = "process_vm"

    def __init__(self) -> None:
        self._marks = _Marks()
        super().__init__()

    @property
    def capabilities(self) -> Capabilities:
        """Everything of one user in one container of a machine."""
        return Capabilities(reach="node", one_sided=True)

    def offer(self, data: Buffer, *, folded: bool = False) -> Offer:
        """See `PullTransport.offer`."""
        self._ready_to_offer()
        raw = source_bytes(data)
        mark_address, mark = self._marks.set(raw)
        return self._offer(_Key(_address(raw), raw.nbytes, mark_address, mark), raw, folded)

    def withdraw(self, offers: Sequence[Offer]) -> None:
        """See `PullTransport.withdraw`."""
        for offer in offers:
            if offer.owner == this_process():
                self._marks.clear(offer.key.mark_address, offer.key.mark)

    def _move(self, jobs: Sequence[Job], guard: Guard) -> None:
        by_owner: dict[Owner, list[Job]] = defaultdict(list)
        for job in jobs:
            by_owner[job.offer.owner].append(job)
        for members in by_owner.values():
            offers = list({job.offer.key: job.offer for job in members}.values())
            _check_near(offers[0])
            try:
                _check_marks(offers)
                _copy(members, guard)
                _check_marks(offers)
            except ShardError:
                _check_alive(offers[0])
                raise
            _check_alive(offers[0])  # It was this process, then, that was read all the time.

    def _release(self) -> None:
        self._marks.clear_all()

    def _forget(self) -> None:
        self._marks = _Marks()


class _Marks:
    """The marks of what this process offers, in memory that stays where it is, and what they stand for.

    They are taken away with it, too: memory that is given back keeps its last words until somebody uses it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: list[npt.NDArray[np.uint64]] = []
        self._free: list[tuple[npt.NDArray[np.uint64], int]] = []
        self._held: dict[int, tuple[npt.NDArray[np.uint64], int, Bytes]] = {}
        weakref.finalize(self, _take_away, self._tables)

    def set(self, raw: Bytes) -> tuple[int, int]:
        """Hold bytes, and set a mark for them; its address and value."""
        mark = secrets.randbits(63) | 1
        with self._lock:
            if not self._free:
                table = np.zeros(_TABLE, np.uint64)
                self._tables.append(table)
                self._free = [(table, i) for i in range(_TABLE)]
            table, i = self._free.pop()
            table[i] = mark
            address = _address(table) + 8 * i
            self._held[address] = (table, i, raw)
        return address, mark

    def clear(self, address: int, mark: int) -> None:
        """Take a mark away, if it stands, and let go of the bytes."""
        with self._lock:
            table, i, _ = self._held.get(address, (None, 0, None))
            if table is None or int(table[i]) != mark:
                return
            table[i] = 0
            del self._held[address]
            self._free.append((table, i))

    def clear_all(self) -> None:
        with self._lock:
            _take_away(self._tables)
            self._held.clear()
            self._free.clear()


def _take_away(tables: list[npt.NDArray[np.uint64]]) -> None:
    while tables:
        tables.pop().fill(0)


def _check_marks(offers: Sequence[Offer]) -> None:
    """Raise unless all offers of one process stand."""
    found = np.zeros(len(offers), np.uint64)
    runs = [(offer.key.mark_address, _address(found) + 8 * i, 8) for i, offer in enumerate(offers)]
    _read(offers[0], runs)
    for offer, mark in zip(offers, found.tolist(), strict=True):
        if mark != offer.key.mark or offer.size_bytes != offer.key.size_bytes:
            raise gone(offer, "it was withdrawn, or its memory is used otherwise")


def _check_near(offer: Offer) -> None:
    check_here(offer)
    if offer.owner.pid_namespace != this_process().pid_namespace:
        raise lost(offer, "its owner is in another container, where pids mean other processes")


def _check_alive(offer: Offer) -> None:
    if not is_alive(offer.owner):
        raise lost(offer, "its owner is dead")


def _copy(jobs: Sequence[Job], guard: Guard) -> None:
    """Small regions many at a time, others block by block."""
    small = [job for job in jobs if job.target.nbytes <= _SMALL and job.offer.fold is None]
    for start in range(0, len(small), readv.MAX_RUNS):
        guard.check()
        some = small[start : start + readv.MAX_RUNS]
        runs = [(job.offer.key.address + job.region.offset, _address(job.target)) for job in some]
        _read(some[0].offer, [(*run, job.target.nbytes) for run, job in zip(runs, some, strict=True)])
    for job in jobs:
        if job.target.nbytes > _SMALL or job.offer.fold is not None:
            _fill(job, guard)


def _fill(job: Job, guard: Guard) -> None:
    base = job.offer.key.address
    job.fill(
        lambda part, offset: _read(job.offer, [(base + offset, _address(part), part.nbytes)]),
        guard,
    )


def _read(offer: Offer, runs: Sequence[tuple[int, int, int]]) -> None:
    """Read (source, target, size) runs of the owner's memory, all of them."""
    for start in range(0, len(runs), readv.MAX_RUNS):
        some = runs[start : start + readv.MAX_RUNS]
        sources, targets, sizes = (list(column) for column in zip(*some, strict=True))
        try:
            done = readv.read(offer.owner.pid, sources, targets, sizes)
        except OSError as error:
            raise _translated(offer, error) from error
        if done < sum(sizes):
            raise gone(offer, f"its owner has no memory there after {done} of {sum(sizes)} bytes")


def _translated(offer: Offer, error: OSError) -> TransportError:
    if error.errno == errno.ESRCH:
        return lost(offer, "its owner is dead")
    if error.errno == errno.EFAULT:
        return gone(offer, "its owner has no memory there any more")
    if error.errno == errno.EPERM:
        why = no_process_vm() or "its owner is another user's, or does not let itself be read"
        return lost(offer, f"its memory may not be read: {why}")
    return lost(offer, f"process_vm_readv failed: {error}")


def _address(array: npt.NDArray[np.generic]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
