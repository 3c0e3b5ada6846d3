"""Whoever opens the generations of a group: a store for each, on a port of its own."""

import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from raycrew.tensor_transport._bytes import Belonging
from raycrew.tensor_transport._ray import node_address
from raycrew.tensor_transport.errors import TransportClosedError
from raycrew.tensor_transport.process_groups._membership import (
    BROKEN_KEY,
    TOKEN_KEY,
    Backend,
    Cause,
    Invitation,
    check_backend,
    check_members,
)
from raycrew.tensor_transport.process_groups._process import endpoint_of, keep_for_ever, listen_on

log = logging.getLogger(__name__)


class GroupHost(Belonging):
    """Opens the generations of one group, and holds the store where its members meet.

    It takes no part in the group, and may be in any process that outlives its members: the driver, or a small
    actor. Each generation has a new port; the one before stays held until then, so that its members hear that
    it is over, and no port is used twice in a row.

    Args:
        group: Name of the group, for people.
        members: Names of the members, in rank order, such as "trainer/0" or "generator/1".
        backend: "nccl", "gloo", or "auto" for NCCL where every member has a GPU of its own, else gloo.
        address: Where members reach this process: this Ray node's address, or the loopback without Ray.
        generation: The last generation that an earlier host of this group opened.

    Raises:
        ValueError: A name comes twice, there is none, or there is no such backend.
    """

    def __init__(
        self,
        group: str,
        members: Sequence[str],
        *,
        backend: Backend = "auto",
        address: str | None = None,
        generation: int = 0,
    ) -> None:
        check_backend(backend)
        self._group = group
        self._members = check_members(members)
        self._backend = backend
        self._address = address or node_address() or "127.0.0.1"
        self._generation = generation
        self._stores: list[Any] = []
        self._latest: Invitation | None = None
        super().__init__()  # Last: a fork in another thread finds all that is to be let go.

    @property
    def generation(self) -> int:
        """The generation that was opened last, 0 before the first."""
        return self._generation

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the members, in rank order."""
        return self._members

    def open(self) -> list[Invitation]:
        """End the present generation, and open another one: an invitation for each member, in rank order.

        Members of the generation that ends get a `StaleGenerationError` from what they do in it, and from
        what they are doing at this moment.

        Raises:
            TransportClosedError: This host is closed.
            TransportError: This process was forked from the one that it belongs to.
        """
        self._check_process()
        with self._lock:
            if self._closed:
                raise TransportClosedError(f"this host of group {self._group!r} is closed")
            store, invitation = self._opened()
            self._end(f"generation {invitation.generation} was opened")
            self._stores = [*self._stores[-1:], store]
            self._latest = invitation
        log.info("opened %s on port %d", invitation.label, invitation.port)
        return [replace(invitation, rank=rank) for rank in range(len(self._members))]

    def end(self, why: str) -> None:
        """End the present generation, before its members have met, too; another one can be opened.

        Args:
            why: For the errors of its members.
        """
        self._check_process()
        with self._lock:
            if not self._closed:
                self._end(why)

    def close(self) -> None:
        """End the present generation and give up the store; idempotent."""
        if self._is_parents:
            return
        with self._lock:
            if not self._closed:
                self._end("the group was closed by its host")
            self._closed = True
            self._stores.clear()

    def _opened(self) -> tuple[Any, Invitation]:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        listening = listen_on(self._address)
        address, port = endpoint_of(listening)
        store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listening.detach(),
        )
        self._generation += 1
        token = uuid.uuid4().hex
        store.set(TOKEN_KEY, token)
        place = (self._group, self._generation, 0, self._members, address, port, self._backend, token)
        return store, Invitation(*place)

    def _end(self, why: str) -> None:
        if self._latest is None:
            return
        message = f"{self._latest.label} is over: {why}; join with an invitation of the present one"
        key = f"{self._latest.token}/{BROKEN_KEY}"
        self._stores[-1].compare_set(key, "", Cause("over", message).encode())

    def _foreign(self) -> str:
        return f"this host of group {self._group!r} is that of process {self._pid}: after a fork, make one"

    def _let_go(self) -> None:
        """A child has no thread that serves the store; ending it there would wait for one."""
        keep_for_ever(*self._stores)
