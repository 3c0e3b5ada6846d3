"""The store of one generation, where its members tell each other what they are about to do."""

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Self

from raycrew.tensor_transport.errors import GroupError, StaleGenerationError, TransportTimeoutError
from raycrew.tensor_transport.process_groups._membership.cause import Cause, group_error
from raycrew.tensor_transport.process_groups._membership.invitation import Invitation
from raycrew.tensor_transport.process_groups._process import Deadline, Gate

TOKEN_KEY = "raycrew/token"  # a key in a store, not a token # nosec B105
"""Says which generation a store belongs to: ports are given to others once they are free."""

BROKEN_KEY = "broken"
GROUP_KEYS = "group"
"""Below it a process group writes what its members tell each other of their connections."""
_ANSWER_S = 20.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _TICK_S = 0.0002, 0.02, 0.25


class Board:
    """Short texts under keys; every question has a deadline. Thread-safe."""

    def __init__(self, invitation: Invitation, store: Any, gate: Gate) -> None:
        self._invitation = invitation
        self._store = store
        self._gate = gate

    @classmethod
    def connect(cls, invitation: Invitation, deadline: Deadline) -> Self:
        """The board that an invitation names.

        Raises:
            StaleGenerationError: There is nothing, or the store of another generation.
            TransportTimeoutError: It does not answer.
        """
        endpoint = (invitation.address, invitation.port)
        try:
            socket.create_connection(endpoint, timeout=deadline.left_s).close()
        except ConnectionRefusedError as error:
            raise _no_store(invitation, "nothing listens there") from error
        except OSError as error:
            raise TransportTimeoutError(f"{_where(invitation)} can't be reached: {error}") from error
        gate, left = Gate(f"store of {invitation.label}"), deadline.left_s
        try:
            board = cls(invitation, gate.run(lambda: _client(endpoint, left), left), gate)
            board._check_token()
        except BaseException:
            gate.close()
            raise
        return board

    def post(self, key: str, text: str) -> None:
        """Put a text under a key."""
        self._ask(lambda: self._store.set(self._full(key), text))

    def claim(self, key: str, text: str) -> str:
        """Put a text under a key where there is none; the text that is there then."""
        full = self._full(key)
        found: bytes = self._ask(lambda: self._store.compare_set(full, "", text))
        return found.decode()

    def has(self, *keys: str) -> bool:
        """Whether there is something under each of these keys."""
        full = [self._full(key) for key in keys]
        return bool(self._ask(lambda: self._store.check(full)))

    def read(self, keys: Sequence[str]) -> list[str]:
        """What is under keys that are there."""
        full = [self._full(key) for key in keys]
        return [found.decode() for found in self._ask(lambda: self._store.multi_get(full))]

    def drop(self, key: str) -> None:
        """Forget a key."""
        self._ask(lambda: self._store.delete_key(self._full(key)))

    def cause(self) -> Cause | None:
        """Why this generation ended, None while it goes on."""
        return Cause.decode(self.read([BROKEN_KEY])[0]) if self.has(BROKEN_KEY) else None

    def blame(self, cause: Cause) -> Cause:
        """End this generation for all members; the cause that all see, that of the first to say so."""
        return Cause.decode(self.claim(BROKEN_KEY, cause.encode()))

    def await_all(
        self, topic: str, ranks: Sequence[int], look: Callable[[list[int]], None]
    ) -> dict[int, str]:
        """What each of these ranks has posted about a topic.

        Args:
            topic: Each posts under `topic/rank`.
            ranks: Who is waited for.
            look: Called now and then with those who are missing; ends the wait by raising.
        """
        keys = [f"{topic}/{rank}" for rank in ranks]
        pause, looked = _FIRST_PAUSE_S, time.monotonic()
        while not self.has(*keys):
            if time.monotonic() - looked >= _TICK_S:
                look([rank for rank, key in zip(ranks, keys, strict=True) if not self.has(key)])
                looked = time.monotonic()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return dict(zip(ranks, self.read(keys), strict=True))

    def for_group(self, timeout_s: float) -> Any:
        """A connection of its own for a process group, whose keys meet no others."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        def clone() -> Any:
            store = self._store.clone()
            store.set_timeout(timedelta(seconds=timeout_s))
            return PrefixStore(self._full(GROUP_KEYS), store)

        return self._ask(clone)

    def close(self) -> None:
        """Leave the store; idempotent."""
        self._store = None
        self._gate.close()

    def _full(self, key: str) -> str:
        return f"{self._invitation.token}/{key}"

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return self._gate.run(call, _ANSWER_S)
        except RuntimeError as error:  # torch's errors of stores
            raise _no_store(self._invitation, str(error).splitlines()[0]) from error

    def _check_token(self) -> None:
        store = self._store
        token = self._ask(lambda: store.get(TOKEN_KEY) if store.check([TOKEN_KEY]) else b"")
        if token.decode() != self._invitation.token:
            raise _no_store(self._invitation, "another store listens there")


def _client(endpoint: tuple[str, int], timeout_s: float) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=timeout_s)
    return TCPStore(*endpoint, is_master=False, wait_for_workers=False, timeout=timeout)


def _where(invitation: Invitation) -> str:
    return f"the store of {invitation.label} at {invitation.address}:{invitation.port}"


def _no_store(invitation: Invitation, why: str) -> GroupError:
    message = (
        f"{_where(invitation)} is gone ({why}): the group was closed, went on to a later generation, or its "
        "host ended; join with an invitation of its present generation"
    )
    return group_error(StaleGenerationError, invitation, message)
