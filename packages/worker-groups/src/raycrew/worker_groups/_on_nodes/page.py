"""The page of a worker: its heartbeat and its running calls, in memory that its node's watch reads.

Behind it is the worker's ring: calls that have ended.

Words of eight bytes, each written at once, so that a reader sees none half written: first the heart's own,
then one slot per call. A slot's number is 0 while the rest of it is being written. Times are of the node's
monotonic clock. Standard library only: a node's watch is sent this module by value.
"""

import fcntl
import mmap
import os
from collections.abc import Mapping
from typing import NamedTuple

from raycrew.worker_groups._on_nodes import ring
from raycrew.worker_groups._on_nodes.process_table import opened

SIZE = 4096
#: What is in the first words.
BEAT, TICK, DEVICE = 0, 1, 2
#: What is in the words of a slot, and where its text begins.
NUMBER, BEGAN, TICKED, ENDED, METHOD = 0, 1, 2, 3, 4
FIRST_SLOT, SLOT_WORDS, METHOD_BYTES = 8, 13, 72
SLOTS = (SIZE // 8 - FIRST_SLOT) // SLOT_WORDS
#: Where the ring begins in the same memory: whoever maps it by itself needs a multiple of this.
RING_AT = mmap.ALLOCATIONGRANULARITY
#: Device memory of a process that uses no device, or of which that can't be told.
UNKNOWN = -1

#: How often a heart beats.
BEAT_S = 1.0

_TRIES = 5


class Call(NamedTuple):
    """A call as the page tells of it; `ended` is 0 while it runs, `ticked` at first its start.

    It is infinite while a stream waits for its caller.
    """

    number: int
    method: str
    began: float
    ticked: float
    ended: float


class Reading(NamedTuple):
    """A whole page; `calls` are those that run, and some that have ended, in the order of their numbers."""

    beat: float
    device_bytes: int | None
    calls: tuple[Call, ...]


def read(page: memoryview) -> Reading:
    """What a page says now."""
    words, times = page[:SIZE].cast("q"), page[:SIZE].cast("d")
    found = (_read_slot(page, words, times, FIRST_SLOT + i * SLOT_WORDS) for i in range(SLOTS))
    calls = [call._replace(ticked=max(call.ticked, times[TICK])) for call in found if call is not None]
    device = words[DEVICE]
    return Reading(times[BEAT], None if device == UNKNOWN else device, tuple(sorted(calls)))


def _read_slot(page: memoryview, words: memoryview, times: "memoryview[float]", at: int) -> Call | None:
    for _ in range(_TRIES):
        if (number := words[at + NUMBER]) == 0:
            return None  # never used, or a call is just beginning
        began, ticked, ended = times[at + BEGAN], times[at + TICKED], times[at + ENDED]
        text = bytes(page[8 * (at + METHOD) : 8 * (at + METHOD) + METHOD_BYTES])
        if words[at + NUMBER] == number:
            return Call(number, text.rstrip(b"\0").decode(errors="replace"), began, ticked, ended)
    return None


def make_page(mark: str) -> mmap.mmap:
    """A page of this process's, to be found by its mark.

    Its name is not the mark's: whoever reads a worker's page is none of those that the worker has started.
    """
    descriptor = os.memfd_create(f"raycrew-page-{mark}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, RING_AT + ring.SIZE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # or it could fail its readers
        return mmap.mmap(descriptor, RING_AT + ring.SIZE)
    finally:
        os.close(descriptor)


def open_page(pid: int, mark: str) -> memoryview | None:
    """The page of a worker's process, to be read as long as this is kept; None where it can't be opened."""
    page = _mapped_of(pid, mark, os.O_RDONLY, {"length": SIZE, "prot": mmap.PROT_READ})
    return None if page is None else memoryview(page)


def open_ring(pid: int, mark: str) -> ring.Ring | None:
    """The ring of a worker's process, as long as this is kept; None where it can't be opened."""
    found = _mapped_of(pid, mark, os.O_RDWR, {"length": ring.SIZE, "offset": RING_AT})
    return None if found is None else ring.Ring(memoryview(found))


def _mapped_of(pid: int, mark: str, flags: int, part: Mapping[str, int]) -> mmap.mmap | None:
    descriptor = opened(pid, f"/memfd:raycrew-page-{mark}", flags)
    if descriptor is None:
        return None
    try:
        return mmap.mmap(descriptor, **part)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
