"""What a host's report says of the batch that it is taken for; pure."""

import logging
import pickle

from raycrew.worker_groups._fan_out.processes import BatchReport, Finished, StrayMessageError, finished

logger = logging.getLogger(__name__)


def ended_items(report: BatchReport, number: int, node_id: str) -> list[Finished]:
    """The items that have ended; none where the report is not about this batch.

    Args:
        report: From the host.
        number: Of the batch.
        node_id: Where the host is.
    """
    if report.stamp is None:
        return []
    try:
        if report.stamp.batch != number:
            raise StrayMessageError(f"a report on batch {report.stamp.batch} for batch {number}")
        return list(finished(report.journal, report.stamp))
    except StrayMessageError as error:
        logger.warning("a batch on node %s is sent again: %s", node_id, error)
        return []


def failure_in(payload: bytes) -> tuple[BaseException | None, str, str, str]:
    """What an item raised, as far as that can be had here; its type's name, its message and its traceback."""
    data, name, message, trace = pickle.loads(payload)
    return None if data is None else _read_back(data), name, message, trace


def _read_back(data: bytes) -> BaseException | None:
    try:
        found = pickle.loads(data)
    except Exception as error:  # noqa: BLE001 - of a class that is in the items' processes alone, say
        logger.debug("what an item raised can't be read back: %s", error)
        return None
    return found if isinstance(found, BaseException) else None
