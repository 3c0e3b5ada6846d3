"""Buckets that nobody needs any more, and who can still release them."""

import logging
from typing import Any

from raycrew.tensor_transport.weights._update import Bucket

logger = logging.getLogger(__name__)

_REPLACED = 4
"""So many publishers of a part that were replaced are waited for: no news of one says whether it lives."""


class Freed:
    """What is to be released, by its scope: all that have the same one can.

    Those are publishers until they retire, replaced ones, too, and receivers that asked before. What none of
    them can release is forgotten after one lease. Each is told of twice, the second time after one lease:
    whoever heard of it first may have been killed or interrupted before it was released, which is idempotent.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._publishers: dict[int, dict[str, str]] = {}
        self._receivers: dict[str, str] = {}
        self._buckets: dict[str, list[Bucket]] = {}
        self._told: dict[str, list[tuple[float, list[Bucket]]]] = {}
        self._unclaimed: dict[str, float] = {}

    def enroll(self, part: int, publisher: str, scope: str) -> None:
        """A publisher starts."""
        scopes = self._publishers.setdefault(part, {})
        scopes.pop(publisher, None)
        scopes[publisher] = scope
        while len(scopes) > 1 + _REPLACED:
            del scopes[next(iter(scopes))]

    def retire(self, part: int, publisher: str) -> None:
        """A publisher is closed: it asks once more."""
        self._publishers.get(part, {}).pop(publisher, None)

    def leave(self, receiver: str) -> None:
        """A receiver is gone."""
        self._receivers.pop(receiver, None)

    def is_claimable(self, scope: str) -> bool:
        """Whether somebody is known who can release what is of a scope; nobody has to where it is empty."""
        publishers = (scope in scopes.values() for scopes in self._publishers.values())
        return not scope or scope in self._receivers.values() or any(publishers)

    def add(self, scope: str, bucket: Bucket) -> None:
        """Nobody needs a bucket any more."""
        if scope and bucket.ticket is not None:
            self._buckets.setdefault(scope, []).append(bucket)

    def collect(self, now: float, scope: str, receiver: str) -> list[Any]:
        """The tickets to release, for one who can; a receiver may ask again."""
        if receiver:
            self._receivers[receiver] = scope
        self._unclaimed.pop(scope, None)
        new, told = self._buckets.pop(scope, []), self._told.pop(scope, [])
        again = [bucket for until, buckets in told if until <= now for bucket in buckets]
        told = [(until, buckets) for until, buckets in told if until > now]
        if told or new:
            self._told[scope] = [*told, *([(now + self._lease_s, new)] if new else ())]
        return [bucket.ticket for bucket in (*again, *new)]

    def forget(self, now: float) -> None:
        """Forget what nobody can release, and nobody else did who had a lease to ask."""
        for scope in list(self._buckets):
            if self.is_claimable(scope):
                self._unclaimed.pop(scope, None)
            elif self._unclaimed.setdefault(scope, now + self._lease_s) <= now:
                del self._unclaimed[scope]
                self._log(scope, self._buckets.pop(scope))
        for scope, told in list(self._told.items()):
            if not self.is_claimable(scope) and told[-1][0] <= now:
                del self._told[scope]

    def _log(self, scope: str, buckets: list[Bucket]) -> None:
        logger.warning(
            "nobody is known who can release %d buckets of %d bytes in %r, nor asked for %g s: they are "
            "forgotten; if their process died its memory is gone, else it is free when that ends",
            len(buckets),
            sum(bucket.size_bytes for bucket in buckets),
            scope,
            self._lease_s,
        )
