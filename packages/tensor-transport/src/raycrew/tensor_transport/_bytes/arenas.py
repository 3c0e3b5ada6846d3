"""Many runs of bytes in few buffers: large ones as they are, small ones side by side in arenas."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from raycrew.tensor_transport.errors import DecodeError
from raycrew.tensor_transport.protocols import Bytes

ALIGNMENT = 64
LARGE_BYTES = 256 * 1024
ARENA_BYTES = 64 * 1024 * 1024


class Slot(NamedTuple):
    """Where a run of bytes lies."""

    buffer: int
    offset: int
    size_bytes: int


def arrange(runs: Sequence[Bytes], *, large_bytes: int = LARGE_BYTES) -> tuple[list[Slot], list[Bytes]]:
    """Lay runs of bytes out in few buffers.

    A run of at least `large_bytes` becomes a buffer of its own without a copy. The others are copied one
    after another into arenas of at most 64 MiB, each run at a multiple of 64 bytes. A run that is given twice
    (the same memory) is laid out once.

    Returns:
        One slot per run, in order, and the buffers.
    """
    buffers: list[Bytes] = []
    slots: list[Slot | None] = [None] * len(runs)
    seen: dict[tuple[int, int], int] = {}
    small: list[int] = []
    for i, run in enumerate(runs):
        first = seen.setdefault((run.__array_interface__["data"][0], run.nbytes), i) if run.nbytes else i
        if first != i:
            continue
        if run.nbytes >= large_bytes:
            slots[i] = Slot(len(buffers), 0, run.nbytes)
            buffers.append(run)
        else:
            small.append(i)
    _fill_arenas(runs, small, slots, buffers)
    placed = [
        slot or slots[seen[run.__array_interface__["data"][0], run.nbytes]]
        for slot, run in zip(slots, runs, strict=True)
    ]
    return [slot for slot in placed if slot is not None], buffers


def locate(slots: Sequence[Slot], buffers: Sequence[Bytes]) -> list[Bytes]:
    """The runs of bytes that the slots name, in place.

    Raises:
        DecodeError: A slot lies outside its buffer.
    """
    sizes = [buffer.nbytes for buffer in buffers]
    runs = []
    for buffer, offset, size in slots:
        if not 0 <= buffer < len(sizes) or offset < 0 or size < 0 or offset + size > sizes[buffer]:
            raise DecodeError(
                f"bytes {offset}..{offset + size} of buffer {buffer} do not exist; buffers hold {sizes}"
            )
        runs.append(buffers[buffer][offset : offset + size])
    return runs


def _fill_arenas(
    runs: Sequence[Bytes], small: list[int], slots: list[Slot | None], buffers: list[Bytes]
) -> None:
    start = 0
    while start < len(small):
        stop, used, offsets = start, 0, []
        while stop < len(small) and (stop == start or used + runs[small[stop]].nbytes <= ARENA_BYTES):
            offsets.append(used)
            used += -(-runs[small[stop]].nbytes // ALIGNMENT) * ALIGNMENT
            stop += 1
        arena = np.empty(used, np.uint8)
        for i, offset in zip(small[start:stop], offsets, strict=True):
            size = runs[i].nbytes
            arena[offset : offset + size] = runs[i]
            slots[i] = Slot(len(buffers), offset, size)
        buffers.append(arena)
        start = stop
