"""What a durable queue writes down: its samples with their rows as they come and change, and which are gone.

Records stand in numbered files, one after another. A file goes when no sample is left whose state begins in
it or in one before. What later records say of samples that began there, they say of samples that are gone.
"""

import errno
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from raycrew.worker_groups.errors import SampleJournalError
from raycrew.worker_groups.rollouts._files import OpenFile
from raycrew.worker_groups.rollouts.samples._states import Keys, Sample, VersionRun
from raycrew.worker_groups.rollouts.samples._storage.files import SEGMENT_BYTES, write_all
from raycrew.worker_groups.rollouts.samples._storage.folder import Folder
from raycrew.worker_groups.rollouts.samples._storage.records import DamagedError, Record, encode, records
from raycrew.worker_groups.rollouts.samples._storage.rows import Place, Standing

logger = logging.getLogger(__name__)

_FORMAT = 1


class Journal:
    """Writes, and reads what an earlier process has written.

    Args:
        path: The folder.
        columns: Names of the columns.
        is_synced: Whether each record is on the disk itself before it counts.
        keys: What samples were put under; those of the folder are noted there.

    Attributes:
        samples: Those that were held; for the caller to take.
        standing: What is known besides; the caller's to change.

    Raises:
        SampleJournalError: The folder is in use, of another queue, or damaged.
        OSError: It can't be read or written.
    """

    def __init__(self, path: Path, columns: Sequence[str], *, is_synced: bool, keys: Keys) -> None:
        self._columns, self._is_synced, self._keys = list(columns), is_synced, keys
        self.samples: dict[int, Sample] = {}
        self.standing = Standing()
        self._folder = Folder(path)
        self._file: OpenFile | None = None
        self._number = self._begun = 0
        self._of_keys = self._counted_to = 0
        most_keys = keys.most
        self._live: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        try:
            numbers = self._folder.numbers()
            self._check_for_gaps(numbers)
            for self._number in numbers:
                self._replay(self._number, is_last=self._number == numbers[-1])
            keys.bound(most_keys)  # meanwhile, as many as whoever wrote a record remembered
            self._number = max(self._sizes, default=0)  # one that was removed again leaves no gap
            self._live.update(sample.segment for sample in self.samples.values())
            self._begin_file()
        except BaseException:
            self._folder.close()
            raise

    # Writing

    def write(
        self,
        samples: Sequence[Sample],
        columns: Sequence[int],
        rows: Sequence[bytes],
        *,
        is_new: bool = False,
        is_moved: bool = False,
    ) -> Iterator[Place]:
        """Write down how samples are now; gives where the rows are.

        Args:
            samples: The samples.
            columns: The positions of columns whose rows came anew.
            rows: These, by sample and then by column.
            is_new: Whether the samples have just come.
            is_moved: Whether what was written of them before is not to count any more.

        Raises:
            OSError: It can't be written.
        """
        sizes = [len(row) for row in rows]
        head = {
            "kind": "samples",
            "columns": list(columns),
            "samples": [[s.id, s.mask, s.tag, s.runs, s.is_rescored, s.scored_by] for s in samples],
            "sizes": sizes,
            "is_new": is_new,
            "is_moved": is_moved,
        }
        if is_new and any(sample.key is not None for sample in samples):
            head["keys"] = [sample.key for sample in samples]
        offset = self._append(head, rows)
        self._count({"produced": len(samples) if is_new else 0})
        if is_new or is_moved:
            self._live.subtract(sample.segment for sample in samples)  # 0, where nothing was written
            for sample in samples:
                sample.segment = self._number
            self._live[self._number] += len(samples)
        return _places(self._number, offset, sizes)

    def gone(self, samples: Sequence[tuple[Sample, str]]) -> None:
        """Write down that samples are held no longer, and why.

        Raises:
            OSError: It can't be written.
        """
        self._append({"kind": "gone", "samples": [[sample.id, why] for sample, why in samples]})
        self._count(Counter(why for _, why in samples))
        self._live.subtract(sample.segment for sample, _ in samples)
        self.trim()

    def note(self) -> None:
        """Write down what is known besides samples.

        Raises:
            OSError: It can't be written.
        """
        self._append(self._head())

    def read(self, place: Place) -> bytes:
        """The row at a place.

        Raises:
            OSError: It is not there.
        """
        return self._folder.read(place)

    @property
    def oldest(self) -> int:
        """The number of the oldest file."""
        return min(self._sizes)

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(self._sizes.values())

    @property
    def n_files(self) -> int:
        """How many there are."""
        return len(self._sizes)

    def close(self) -> None:
        """Write nothing more; idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._folder.close()

    def mend(self, samples: Iterable[Sample]) -> None:
        """Count anew which files are needed, after an operation that was broken off."""
        self._live = Counter(sample.segment for sample in samples)

    def _append(self, head: Mapping[str, Any], rows: Sequence[bytes] = ()) -> int:
        data, rows_at = encode(head, rows)
        filled = self._sizes[self._number] - self._of_keys
        if filled + len(data) > SEGMENT_BYTES and filled > len(data):
            self._begin_file()
        if not self._sizes[self._number]:
            self._write_head()
        return self._write_at_end(data) + rows_at

    def _write_at_end(self, data: bytes) -> int:
        """Write behind what counts."""
        if self._file is None:
            raise OSError(errno.EBADF, "it is closed", str(self._folder.path))
        offset, descriptor = self._sizes[self._number], self._file.descriptor
        self._cut(descriptor)
        write_all(descriptor, data, offset)
        if self._is_synced:
            os.fdatasync(descriptor)
        self._sizes[self._number] += len(data)
        return offset

    def _cut(self, descriptor: int) -> None:
        """Have what a write that was broken off has left behind what counts go."""
        if os.fstat(descriptor).st_size > (end := self._sizes[self._number]):
            os.ftruncate(descriptor, end)

    def _begin_file(self) -> None:
        number, before = self._number + 1, self._file
        if before is not None:
            self._cut(before.descriptor)  # in the last file alone a tail that is not whole is none
        if self._begun == number:  # by a call that was broken off
            self._folder.remove(number)
        self._begun = number
        made = self._folder.create(number, is_synced=self._is_synced)
        self._sizes[number] = 0
        self._file, self._number = made, number
        if before is not None:
            before.close()
        self._write_head()
        self.trim()

    def _write_head(self) -> None:
        """What stands in earlier files, too, which may go."""
        keys = [[key, sample] for key, sample in self._keys]
        of_keys = encode({"kind": "keys", "keys": keys})[0] if keys else b""
        self._of_keys = len(of_keys)
        self._write_at_end(encode(self._head())[0] + of_keys)

    def _head(self) -> dict[str, Any]:
        version, next_id, tally = self.standing
        known = {"version": version, "next_id": next_id, "tally": dict(tally)}
        known["max_keys"] = self._keys.most
        return {"kind": "head", "format": _FORMAT, "columns": self._columns, **known}

    def trim(self) -> None:
        """Remove files that nothing needs any more."""
        while (oldest := self.oldest) != self._number and not self._live[oldest]:
            self._folder.remove(oldest, is_synced=self._is_synced)
            del self._sizes[oldest], self._live[oldest]

    # Reading

    def _replay(self, number: int, *, is_last: bool) -> None:
        data, end = self._folder.content(number), 0
        try:
            for record in records(data, is_last=is_last):
                self._replay_record(record)
                end = record.end
        except DamagedError as error:
            name = self._folder.name(number)
            raise SampleJournalError(
                f"{name} is damaged at byte {error.offset}: nothing of it is used"
            ) from None
        if end < len(data):
            logger.warning(
                "%s: the last %d bytes were never finished, and are cut off", number, len(data) - end
            )
            self._folder.cut(number, end)
        if end:
            self._sizes[number] = end
        else:
            self._folder.remove(number)

    def _check_for_gaps(self, numbers: Sequence[int]) -> None:
        missing = set(range(numbers[0], numbers[-1])).difference(numbers) if numbers else ()
        if missing:
            raise SampleJournalError(f"{self._folder.name(min(missing))} is missing: nothing is used")

    def _replay_record(self, record: Record) -> None:
        kinds = {
            "head": self._replay_head,
            "keys": self._replay_keys,
            "samples": self._replay_samples,
            "gone": self._replay_gone,
        }
        if record.head.get("format", _FORMAT) != _FORMAT or record.head["kind"] not in kinds:
            raise SampleJournalError(f"{self._folder.path} was written by another version of raycrew")
        kinds[record.head["kind"]](record)

    def _replay_head(self, record: Record) -> None:
        columns = record.head["columns"]
        if columns != self._columns:
            raise SampleJournalError(
                f"{self._folder.path} is of a queue with the columns {', '.join(columns)}, not of one with "
                f"{', '.join(self._columns)}"
            )
        names = ("version", "next_id", "tally")
        self.standing = Standing(*(record.head[name] for name in names))
        self._counted_to = self.standing.next_id
        self._keys.bound(record.head.get("max_keys", self._keys.most))  # earlier versions don't tell

    def _replay_keys(self, record: Record) -> None:
        self._keys.clear()
        for key, sample_id in record.head["keys"]:
            self._keys.note(key, sample_id)

    def _replay_samples(self, record: Record) -> None:
        columns, is_new = record.head["columns"], record.head["is_new"] or record.head["is_moved"]
        places = _places(self._number, record.rows_at, record.head["sizes"])
        for sample_id, mask, tag, runs, *scored in record.head["samples"]:
            rows: list[Any] = [None] * len(self._columns)
            if (known := self.samples.get(sample_id)) is not None:
                rows = known.rows
            segment = self._number if known is None or is_new else known.segment
            for i in columns:
                rows[i] = next(places)
            rows = [row if mask & (2 << i) else None for i, row in enumerate(rows)]
            versions = tuple(VersionRun(*run) for run in runs)
            sample = Sample(sample_id, mask, tag, versions, rows, segment=segment)
            sample.is_rescored, sample.scored_by = scored
            if known is not None or is_new:  # else it is gone, with the file that it began in
                self.samples[sample_id] = sample
        ids = [sample_id for sample_id, *_ in record.head["samples"]]
        self.standing = self.standing._replace(next_id=max([self.standing.next_id, *(i + 1 for i in ids)]))
        self._count({"produced": len(ids) if record.head["is_new"] else 0})
        for key, sample_id in zip(record.head.get("keys", ()), ids, strict=False):
            self._replay_key(key, sample_id)

    def _replay_key(self, key: str | None, sample_id: int) -> None:
        if key is None:
            return
        if (before := self._keys.id_of(key)) is not None:  # of a put that was broken off, and made again
            self.samples.pop(before, None)
            self._count({"produced": -(before >= self._counted_to)})  # else its head has left it out
        self._keys.note(key, sample_id)

    def _replay_gone(self, record: Record) -> None:
        for sample_id, _ in record.head["samples"]:
            self.samples.pop(sample_id, None)
        self._count(Counter(why for _, why in record.head["samples"]))

    def _count(self, more: Mapping[str, int]) -> None:
        tally = Counter(self.standing.tally)
        tally.update(more)
        self.standing = self.standing._replace(tally=tally)


def _places(segment: int, offset: int, sizes: Iterable[int]) -> Iterator[Place]:
    for size in sizes:
        yield Place(segment, offset, size)
        offset += size
