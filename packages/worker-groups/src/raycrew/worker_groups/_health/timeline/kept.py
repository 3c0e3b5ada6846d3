"""What is kept of a run: calls and spans, as many as fit. Pure."""

from collections.abc import Mapping

from raycrew.worker_groups._health.observers import Span
from raycrew.worker_groups._health.timeline.records import Call, spans_of


class Kept:
    """Listens, and keeps.

    Args:
        max_spans: How many spans are kept; a call makes up to three for each rank, and one.

    Attributes:
        calls: As they ended.
        dropped: How many calls and other spans did not fit.
    """

    def __init__(self, max_spans: int) -> None:
        self.calls: list[Call] = []
        self.dropped = 0
        self._others: list[Span] = []
        self._max_spans, self._n_spans = max_spans, 0

    def call(self, call: Call) -> None:
        """Keep a call."""
        if self._has_room(1 + 3 * len(call.parts)):
            self.calls.append(call)

    def amended(self, before: Call, after: Call) -> None:
        """Keep a call as it is now."""
        for i in reversed(range(len(self.calls))):  # most are of a moment ago
            if self.calls[i] is before:
                self.calls[i] = after
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
        return [*list(self._others), *(span for call in list(self.calls) for span in spans_of(call))]

    def _has_room(self, more: int) -> bool:
        if self._n_spans + more > self._max_spans:
            self.dropped += 1
            return False
        self._n_spans += more
        return True
