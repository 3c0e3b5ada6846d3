"""The ring of a worker: its last calls that have ended, behind its page, noted while somebody wants to know.

One process writes, others read. Its own words are of eight bytes, each written at once; how many calls were
noted is written when the last of them is there whole. Times are of the node's monotonic clock. Standard
library only: a node's watch is sent this module by value.
"""

import struct
from collections.abc import Iterator

ENTRIES = 4096
#: A call: its id, when it began and ended, how long it paused, its method.
_ENTRY = "=24s3d64s"  # no Struct, which can't be sent
_ENTRY_SIZE = struct.calcsize(_ENTRY)
_WANTED, _COUNT, _FIRST = 0, 1, 8 * 8
#: First its own words, then the entries.
SIZE = _FIRST + ENTRIES * _ENTRY_SIZE


#: A call that has ended: its id, its method, when it began and ended, and how long a stream paused.
Note = tuple[bytes, str, float, float, float]


class Ring:
    """The memory of a ring.

    Args:
        memory: `SIZE` bytes, of zeros at first.
    """

    def __init__(self, memory: memoryview) -> None:
        self._bytes = memory[:SIZE]
        self._words, self._times = self._bytes.cast("q"), self._bytes.cast("d")

    # Whoever wants to know

    def want(self, until: float) -> None:
        """Have calls noted that begin before a moment."""
        self._times[_WANTED] = until

    @property
    def wanted(self) -> float:
        """Until when calls are noted."""
        return self._times[_WANTED]

    @property
    def count(self) -> int:
        """How many calls were noted by now."""
        return self._words[_COUNT]

    def since(self, number: int) -> tuple[int, bytes]:
        """How many calls were noted by now, and those after the first `number`, for `notes_in`.

        What is missing was overwritten, or may have been, before it was read.
        """
        count = self.count
        first = max(number, count - ENTRIES) + 1
        data = self._copied(first, count)
        intact = self.count + 2 - ENTRIES  # the next one may be half written, over the oldest
        return count, data[_ENTRY_SIZE * max(0, intact - first) :]

    def _copied(self, first: int, last: int) -> bytes:
        if last < first:
            return b""
        begin, end = _place(first), _place(last) + _ENTRY_SIZE
        if begin < end:
            return bytes(self._bytes[begin:end])
        return bytes(self._bytes[begin:]) + bytes(self._bytes[_FIRST:end])

    # The worker

    def is_wanted(self, now: float) -> bool:
        """Whether calls that begin now are to be noted."""
        return self._times[_WANTED] > now

    def note(self, call: bytes, method: bytes, began: float, ended: float, paused_s: float) -> None:
        """Note a call that has ended; not from several threads at once."""
        number = self._words[_COUNT] + 1
        struct.pack_into(_ENTRY, self._bytes, _place(number), call, began, ended, paused_s, method)
        self._words[_COUNT] = number  # last, so that nothing is told of that is half noted


def notes_in(data: bytes) -> Iterator[Note]:
    """The calls that `Ring.since` tells of, the first one first."""
    names: dict[bytes, str] = {}
    for call, began, ended, paused_s, method in struct.iter_unpack(_ENTRY, data):
        name = names.get(method)
        if name is None:
            name = names[method] = method.rstrip(b"\0").decode(errors="replace")
        yield call, name, began, ended, paused_s


def _place(number: int) -> int:
    return _FIRST + (number - 1) % ENTRIES * _ENTRY_SIZE
