"""A group's record, kept where everybody on the cluster can read it until the group ends."""

import logging
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from raycrew.worker_groups._health.roster.records import GroupRecord, StartRecord
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
        self._standing: GroupRecord | None = None
        self._renewal: StartRecord | None = None
        self._lock = threading.Lock()

    def announce(self, record: GroupRecord) -> None:
        """This is the record as long as the group is starting."""
        with self._lock:
            if self._standing is None and not self._is_over:
                self._put(record)

    def publish(self, record: GroupRecord) -> None:
        """From now on this is the record, unless the group has ended meanwhile."""
        with self._lock:
            self._standing = replace(record, start=self._renewal)
            self._put(self._standing)

    @contextmanager
    def renewing(self, start: StartRecord) -> Iterator[None]:
        """Within, the record of a group that stands says that this is done to it."""
        self._tell(start)
        try:
            yield
        finally:
            self._tell(None)

    def _tell(self, start: StartRecord | None) -> None:
        with self._lock:
            self._renewal = start
            if self._standing is not None:
                self._standing = replace(self._standing, start=start)
                self._put(self._standing)

    def _put(self, record: GroupRecord) -> None:
        try:
            put_record(self._key, record.as_text(), _ANSWER_S, partial(self._amend, record))
            self._amend(record)
        except Exception as error:  # noqa: BLE001 - whatever Ray says, the group goes on without it
            logger.info("%s: others can't be told of its ranks: %s", record.name, error)

    def _amend(self, came: GroupRecord) -> None:
        """Put right what a record has come over, perhaps late."""
        if self._is_over:
            drop_records([self._key], _ANSWER_S)
        elif (standing := self._standing) is not None and standing is not came:
            put_record(self._key, standing.as_text(), _ANSWER_S, partial(self._amend, standing))

    def end(self) -> None:
        """Take the record away, for good; waits for no lock, as a signal handler may come in between."""
        self._is_over = True
        try:
            drop_records([self._key], _ANSWER_S)
        except Exception as error:  # noqa: BLE001 - whatever Ray says, the group ends without it
            logger.debug("the record %s stays: %s", self._key, error)
