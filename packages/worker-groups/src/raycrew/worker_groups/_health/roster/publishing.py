"""A group's record, kept where everybody on the cluster can read it until the group ends."""

import logging
import threading
import uuid

from raycrew.worker_groups._health.roster.records import GroupRecord
from raycrew.worker_groups._ray import drop_records, put_record

logger = logging.getLogger(__name__)

#: How keys of groups begin.
GROUPS = "group/"

_ANSWER_S = 2.0  # a group goes on, and ends, without its record


class Publication:
    """Of one group; that a record can't be left or taken away is logged, and fails nothing."""

    def __init__(self) -> None:
        self._key = f"{GROUPS}{uuid.uuid4().hex}"
        self._is_over = False
        self._lock = threading.Lock()

    def publish(self, record: GroupRecord) -> None:
        """From now on this is the record, unless the group has ended meanwhile."""
        with self._lock:
            try:
                put_record(self._key, record.as_text(), _ANSWER_S, self._drop_if_over)
                self._drop_if_over()
            except Exception as error:  # noqa: BLE001 - whatever Ray says, the group goes on without it
                logger.info("%s: others can't be told of its ranks: %s", record.name, error)

    def _drop_if_over(self) -> None:
        if self._is_over:
            drop_records([self._key], _ANSWER_S)

    def end(self) -> None:
        """Take the record away, for good; waits for no lock, as a signal handler may come in between."""
        self._is_over = True
        try:
            drop_records([self._key], _ANSWER_S)
        except Exception as error:  # noqa: BLE001 - whatever Ray says, the group ends without it
            logger.debug("the record %s stays: %s", self._key, error)
