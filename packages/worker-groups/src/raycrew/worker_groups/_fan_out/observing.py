"""What is told of a batch that is over to whoever observes this process."""

import time
from collections.abc import Sequence

from raycrew.worker_groups._fan_out.processes import BatchReport
from raycrew.worker_groups._health import Observer, Span


def tell_of_batch(
    observer: Observer,
    node_id: str,
    function: str,
    sent: float,
    report: BatchReport,
    seconds: Sequence[float],
    sizes: Sequence[int],
) -> None:
    """Tell of a batch: its items ran last, one after the other, after it had waited.

    Args:
        observer: Who is told.
        node_id: Where it ran.
        function: What ran.
        sent: When it was sent, by the monotonic clock.
        report: What became of it.
        seconds: Of each item that ended.
        sizes: Bytes of each item that was sent.
    """
    now, row = time.monotonic(), f"node {node_id[:8]}"
    began = max(sent, now - sum(seconds))
    if began > sent:
        observer.spanned(Span("fan_out", row, function, "queued", sent, began))
    detail = {"items": len(seconds), "sent": len(sizes), "stop": report.stop}
    observer.spanned(Span("fan_out", row, function, "running", began, now, detail))
    for direction, size_bytes in (("sent", sum(sizes)), ("received", len(report.journal))):
        observer.counted("fan_out_bytes", {"direction": direction}, size_bytes)
    observer.counted("fan_out_items", {"function": function, "stop": report.stop}, len(seconds))
