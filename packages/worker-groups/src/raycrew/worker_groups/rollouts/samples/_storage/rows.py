"""The rows of samples, in memory."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from raycrew.worker_groups.rollouts.samples._states import Sample


class Held(NamedTuple):
    """A row that is no bytes: of a handle on many rows, or something as it is.

    Attributes:
        value: The handle.
        row: Which of its rows; None where it is the row.
    """

    value: Any
    row: int | None


class Place(NamedTuple):
    """Where the bytes of a row are."""

    segment: int
    offset: int
    size: int


Row = bytes | Held


class Standing(NamedTuple):
    """What is known of a queue besides its samples.

    Attributes:
        version: The newest version of the weights.
        next_id: The number of the next sample.
        tally: What has happened.
    """

    version: int = 0
    next_id: int = 0
    tally: Mapping[str, float] = MappingProxyType({})


class Recovered(NamedTuple):
    """What an earlier process has left.

    Attributes:
        samples: Those that were held, in order.
        standing: What else was known.
    """

    samples: Sequence[Sample] = ()
    standing: Standing = Standing()


class Rows:
    """Keeps rows in memory, and says how many bytes they take.

    Args:
        max_bytes: Most bytes in memory; None for no bound.

    Attributes:
        in_memory_bytes: Of rows in memory.
        on_disk_bytes: Of rows that are only on disk.
        overflows: Whether there is room on disk for what does not fit.
    """

    overflows = False

    def __init__(self, max_bytes: int | None) -> None:
        self.in_memory_bytes = self.on_disk_bytes = 0
        self._max_bytes = max_bytes

    def has_room(self, size_bytes: int) -> bool:
        """Whether so much more may come."""
        return self.overflows or self._fits(size_bytes) or not self.in_memory_bytes

    def _fits(self, size_bytes: int) -> bool:
        return self._max_bytes is None or self.in_memory_bytes + size_bytes <= self._max_bytes

    def keep(self, row: Row) -> Row | Place:
        """What stands for a row from now on.

        Raises:
            OSError: There is no room on disk.
        """
        if isinstance(row, bytes):
            self.in_memory_bytes += len(row)
        return row

    def read(self, kept: Row | Place) -> Row:
        """The row that something stands for.

        Raises:
            OSError: It can't be read.
        """
        return self._at(kept) if isinstance(kept, Place) else kept

    def free(self, kept: Iterable[Row | Place | None]) -> None:
        """Want rows no longer."""
        for row in kept:
            if isinstance(row, bytes):
                self.in_memory_bytes -= len(row)
            elif isinstance(row, Place):
                self.on_disk_bytes -= row.size
                self._free_place(row)

    def mend(self, samples: Sequence[Sample]) -> None:
        """Count anew what the rows of all samples take, after an operation that was broken off."""
        kept = [row for sample in samples for row in sample.rows]
        self.in_memory_bytes = sum(len(row) for row in kept if isinstance(row, bytes))
        self.on_disk_bytes = sum(row.size for row in kept if isinstance(row, Place))

    def _at(self, place: Place) -> bytes:
        raise OSError(f"nothing is on disk, and so nothing at {place}")

    def _free_place(self, place: Place) -> None:
        pass

    # What whoever keeps rows tells of their samples

    def recovered(self) -> Recovered:
        """What an earlier process has left."""
        return Recovered()

    def came(self, samples: Sequence[Sample], columns: Sequence[int], *, is_new: bool = False) -> None:
        """Samples, or rows of some columns of theirs, are there now.

        Raises:
            OSError: They can't be written down.
        """

    def lost_columns(self, samples: Sequence[Sample]) -> None:
        """Samples have lost columns; as `came`."""

    def went(self, samples: Sequence[tuple[Sample, str]], held: Mapping[int, Sample]) -> None:
        """Samples are no longer held, for a reason; as `came`."""

    def stands(self, standing: Standing) -> None:
        """What is known besides samples; as `came`."""

    def close(self) -> None:
        """Give up what is on disk; idempotent."""


def size_of(rows: Iterable[Sequence[Row]]) -> int:
    """Bytes of rows in columns."""
    return sum(len(row) for column in rows for row in column if isinstance(row, bytes))
