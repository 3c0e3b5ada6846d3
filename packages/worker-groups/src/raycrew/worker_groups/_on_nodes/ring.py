"""The ring of a worker: its last calls that have ended, behind its page, noted while somebody wants to know.

One process writes, others read. Words of eight bytes, each written at once; an entry's number is 0 while the
rest of it is being written. Times are of the node's monotonic clock. Standard library only: a node's watch is
sent this module by value.
"""

from typing import NamedTuple

ENTRIES, ENTRY_WORDS = 2048, 16
#: First its own words, then the entries.
SIZE = 8 * (8 + ENTRIES * ENTRY_WORDS)
CALL_BYTES = 24

_WANTED, _COUNT, _FIRST = 0, 1, 8
_NUMBER, _CALL, _BEGAN, _ENDED, _PAUSED, _METHOD = 0, 1, 4, 5, 6, 8
_METHOD_BYTES = 8 * (ENTRY_WORDS - _METHOD)


class Note(NamedTuple):
    """A call that has ended: its id, its method, when it began and ended, and how long a stream paused."""

    call: bytes
    method: str
    began: float
    ended: float
    paused_s: float


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

    def since(self, number: int) -> tuple[int, list[Note]]:
        """Calls that were noted after the first `number`, and how many were noted by now.

        What is missing was overwritten before it was read.
        """
        count = self.count
        numbers = range(max(number, count - ENTRIES) + 1, count + 1)
        found = (self._read(wanted) for wanted in numbers)
        return count, [note for note in found if note is not None]

    def _read(self, number: int) -> Note | None:
        at = _place(number)
        if self._words[at + _NUMBER] != number:
            return None
        data = bytes(self._bytes[8 * at : 8 * (at + ENTRY_WORDS)])
        began, ended, paused = (self._times[at + word] for word in (_BEGAN, _ENDED, _PAUSED))
        if self._words[at + _NUMBER] != number:
            return None
        method = data[8 * _METHOD :].rstrip(b"\0").decode(errors="replace")
        return Note(data[8 * _CALL : 8 * _CALL + CALL_BYTES], method, began, ended, paused)

    # The worker

    def is_wanted(self, now: float) -> bool:
        """Whether calls that begin now are to be noted."""
        return self._times[_WANTED] > now

    def note(self, call: bytes, method: bytes, began: float, ended: float, paused_s: float) -> None:
        """Note a call that has ended; not from several threads at once."""
        words, times = self._words, self._times
        number = words[_COUNT] + 1
        at = _place(number)
        words[at + _NUMBER] = 0
        text = call[:CALL_BYTES].ljust(CALL_BYTES, b"\0")
        self._bytes[8 * (at + _CALL) : 8 * (at + _CALL) + CALL_BYTES] = text
        times[at + _BEGAN], times[at + _ENDED], times[at + _PAUSED] = began, ended, paused_s
        name = method[:_METHOD_BYTES].ljust(_METHOD_BYTES, b"\0")
        self._bytes[8 * (at + _METHOD) : 8 * (at + ENTRY_WORDS)] = name
        words[at + _NUMBER] = number
        words[_COUNT] = number  # last, so that nothing is told of that is half noted


def _place(number: int) -> int:
    return _FIRST + (number - 1) % ENTRIES * ENTRY_WORDS
