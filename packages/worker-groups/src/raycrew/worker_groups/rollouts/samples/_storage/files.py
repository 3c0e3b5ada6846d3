"""Reading and writing whole rows at an offset of a file."""

import os

from raycrew.worker_groups.rollouts.samples._storage.rows import Place

SEGMENT_BYTES = 64 * 1024 * 1024


def write_all(descriptor: int, data: bytes, offset: int) -> None:
    """Write at an offset of a file."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        offset += written
        rest = rest[written:]


def read_all(descriptor: int, place: Place) -> bytes:
    """The bytes at a place in a file.

    Raises:
        OSError: They are not all there.
    """
    data = os.pread(descriptor, place.size, place.offset)
    while len(data) < place.size:
        more = os.pread(descriptor, place.size - len(data), place.offset + len(data))
        if not more:
            raise OSError(
                f"a row of {place.size} bytes at {place.offset} is cut short; was its file truncated?"
            )
        data += more
    return data
