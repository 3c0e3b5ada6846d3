"""Bytes in Ray's object store: in place on each node that has them, moved between nodes by Ray."""

import threading
from collections.abc import Sequence
from typing import Any

from raycrew.tensor_transport import _ray
from raycrew.tensor_transport.errors import ShardLostError
from raycrew.tensor_transport.protocols import Bytes
from raycrew.tensor_transport.transports._interface import Buffer, Capabilities, Guard, Offer
from raycrew.tensor_transport.transports._pulling import Job, Puller, lost, source_bytes

_LOOK_S = 0.1
"""Ray's waits can't be interrupted: so often a cancellation is looked for."""


class ObjectStoreTransport(Puller):
    """Offers are objects in Ray's store, one each: pack small ones together.

    They go with the process that offered them; after a withdrawal, once nobody holds the offer any more.
    """

    name = "object_store"

    def __init__(self) -> None:
        self._held: dict[str, Any] = {}
        self._holding = threading.Lock()
        super().__init__()

    @property
    def capabilities(self) -> Capabilities:
        """Everywhere in the cluster, and in place; Ray asks the owner where an object is."""
        return Capabilities(reach="cluster", maps=True, keeps_copy=True)

    def offer(self, data: Buffer, *, folded: bool = False) -> Offer:
        """See `PullTransport.offer`."""
        self._ready_to_offer()
        raw = source_bytes(data)
        ref = _ray.put(raw)
        with self._holding:
            self._held[ref.hex()] = ref
        return self._offer(ref, raw, folded)

    def map(self, offer: Offer, *, timeout_s: float | None = None) -> Bytes:
        """See `PullTransport.map`; from another node, the bytes are copied to this one first."""
        self._check_open()
        found: Bytes = _get([offer], timeout_s, _ray.current_session())[0]
        return found

    def withdraw(self, offers: Sequence[Offer]) -> None:
        """See `PullTransport.withdraw`: whoever holds the offer still can have the bytes."""
        with self._holding:
            for offer in offers:
                self._held.pop(offer.key.hex(), None)

    def _move(self, jobs: Sequence[Job], guard: Guard) -> None:
        offers, session = list({job.offer.key: job.offer for job in jobs}.values()), _ray.current_session()
        _await(offers, guard, session)
        got = _get(offers, guard.left_s(), session)
        found = dict(zip([offer.key for offer in offers], got, strict=True))
        for job in jobs:
            job.copy_from(found[job.offer.key], guard)

    def _release(self) -> None:
        self._held.clear()

    def _forget(self) -> None:
        """A forked child can't use Ray: what it pulls or offers is refused."""
        self._holding = threading.Lock()


def _await(offers: Sequence[Offer], guard: Guard, session: _ray.Session) -> None:
    """Wait until all objects are on this node, or known to be lost, as long as the connection lasts."""
    left = [offer.key for offer in offers]
    while left:
        guard.check()
        until = guard.left_s()
        left = _ray.not_here(left, _LOOK_S if until is None else min(_LOOK_S, until), session)


def _get(offers: Sequence[Offer], timeout_s: float | None, session: _ray.Session) -> list[Bytes]:
    try:
        found: list[Bytes] = _ray.get([offer.key for offer in offers], timeout_s, session)
    except ShardLostError as error:
        for offer in offers:  # Ray tells of one of them, but not of which.
            try:
                _ray.get(offer.key, timeout_s, session)
            except ShardLostError:
                raise lost(offer, str(error)) from error
        raise
    return found
