"""What is kept of a run: calls and spans, as many as fit. Pure."""

import marshal
from collections.abc import Callable, Mapping

from raycrew.worker_groups._health.observers import Span
from raycrew.worker_groups._health.timeline.records import LATER, NOTHING, Call, Part, Wants, spans_of


class Kept:
    """Listens, and keeps.

    Args:
        max_spans: How many spans are kept; a call makes up to three for each rank, and one.
        owner: Gives who can ask for them; None where nobody can any more.

    Attributes:
        dropped: How many calls and other spans did not fit.
    """

    def __init__(self, max_spans: int, owner: Callable[[], object] = object) -> None:
        self.dropped = 0
        self._calls: list[bytes] = []
        self._others: list[Span] = []
        self._max_spans, self._n_spans = max_spans, 0
        self._owner = owner

    def __len__(self) -> int:
        """How many calls."""
        return len(self._calls)

    def calls(self) -> list[Call]:
        """Those that are kept by now, as they ended, without their contexts."""
        return [_unpacked(call) for call in list(self._calls)]

    @property
    def wants(self) -> Wants:
        """Nothing once something did not fit, or nobody can ask for it, as its owner is gone."""
        return NOTHING if self.dropped or self._owner() is None else LATER

    def left_out(self) -> None:
        """Count what would not have fitted."""
        self.dropped += 1

    def call(self, call: Call) -> None:
        """Keep a call; none after one that did not fit, else small ones alone would be told of."""
        if self.dropped:
            self.left_out()
        elif self._has_room(1 + 3 * len(call.parts)):
            self._calls.append(_packed(call))

    def amended(self, before: Call, after: Call) -> None:
        """Keep a call as it is now."""
        packed = _packed(before)
        for i in reversed(range(len(self._calls))):  # most are of a moment ago
            if self._calls[i] == packed:
                self._calls[i] = _packed(after)
                return

    def span(self, span: Span) -> None:
        """Keep a span."""
        if self._has_room(1):
            self._others.append(span)

    def count(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Counts are not drawn."""

    def look(self, open_calls: Mapping[str, int]) -> None:
        """Nor is what is open."""

    def spans(self) -> list[Span]:
        """All that is to be drawn."""
        return [*list(self._others), *(span for call in self.calls() for span in spans_of(call))]

    def _has_room(self, more: int) -> bool:
        if self._n_spans + more > self._max_spans:
            self.dropped += 1
            return False
        self._n_spans += more
        return True


# Of many objects that stay, the garbage collector would look at all that a program has, again and again; at
# bytes it never does. Version 2 of the format makes the same bytes of equal calls.


def _packed(call: Call) -> bytes:
    group, method, sent, parts, *outcome, _ = call
    names = str.__str__(group), str.__str__(method)  # some are of a subclass, as numpy's and Enums' are
    told = [(int(rank), began, ended, paused_s) for rank, began, ended, paused_s in parts]
    return marshal.dumps((*names, sent, told, *outcome), 2)


def _unpacked(packed: bytes) -> Call:
    group, method, sent, parts, *outcome = marshal.loads(packed)  # of this process # nosec B302
    return Call(group, method, sent, tuple(Part(*part) for part in parts), *outcome)
