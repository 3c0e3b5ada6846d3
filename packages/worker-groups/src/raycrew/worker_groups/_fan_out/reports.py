"""What a host's report says of the batch that it is taken for; pure."""

import logging

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
