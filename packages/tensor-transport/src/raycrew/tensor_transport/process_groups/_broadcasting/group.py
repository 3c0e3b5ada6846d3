"""A member's end of one generation of a group: the same bytes from one member to all others."""

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Literal

import torch

from raycrew.tensor_transport._bytes import Belonging, count_write
from raycrew.tensor_transport.errors import (
    GroupError,
    GroupMismatchError,
    TransportClosedError,
    TransportError,
)
from raycrew.tensor_transport.process_groups._broadcasting.pieces import PIECE_BYTES
from raycrew.tensor_transport.process_groups._broadcasting.session import Party, Wish
from raycrew.tensor_transport.process_groups._broadcasting.views import as_source, as_target
from raycrew.tensor_transport.process_groups._membership import Cause, Lifeline, group_error
from raycrew.tensor_transport.process_groups._process import Gate, keep_for_ever
from raycrew.tensor_transport.transports import Buffer, Capabilities, Choice, Guard, Transfer

log = logging.getLogger(__name__)


class CollectiveGroup(Belonging):
    """One process's place in one generation of a group; `join_group` makes it. A `BroadcastTransport`.

    Operations take their turns in the order in which they were begun, which has to be the same in every
    member. Before a byte moves all members compare what they want, and an operation succeeds when every
    member has every byte. After any other failure than a `GroupMismatchError` the group is broken, for all
    members: its error says why, and they join the next generation.

    On a GPU, an operation comes after what the calling thread's current stream had queued when it was begun;
    once it has ended, its bytes are there for all streams.

    It needs no default group, and does not meet the one that the process may have.
    """

    def __init__(self, party: Party, lifeline: Lifeline, choice: Choice) -> None:
        self._party = party
        self._lifeline = lifeline
        self._choice = choice
        self._runner = Gate(f"operations of {party.invitation.label}")
        self._turn = 0
        self._live: set[Transfer] = set()
        self._failure: GroupError | None = None
        super().__init__()  # Last: a fork in another thread finds all that is to be let go.

    @property
    def name(self) -> str:
        """What moves the bytes: "gloo" or "nccl"."""
        return self._choice.name

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return Capabilities(reach="cluster", devices=(self._party.fabric.device.type,))

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._party.invitation.rank

    @property
    def world_size(self) -> int:
        """How many members the group has."""
        return len(self._party.invitation.members)

    @property
    def members(self) -> tuple[str, ...]:
        """Names of all members, in rank order."""
        return self._party.invitation.members

    @property
    def generation(self) -> int:
        """Which generation of the group this is."""
        return self._party.invitation.generation

    @property
    def failure(self) -> GroupError | None:
        """Why the group can't be used any more, where this member knows of it; None while it can."""
        return self._failure

    def available(self) -> str | None:
        """Why it can't be used in this process; None where it can."""
        if self._is_parents:
            return self._foreign()
        if self._closed:
            return "it is closed"
        return None if self._failure is None else str(self._failure)

    def explain(self) -> str:
        """Which backend the group uses and why: the same text on all members."""
        head = f"{self._party.invitation.label}, {self.world_size} members: {self._choice.name}"
        lines = (
            f"  {each.name}: {each.reason or 'every member can use it'}" for each in self._choice.candidates
        )
        return "\n".join([head, *lines])

    def send(
        self,
        buffers: Sequence[Buffer],
        *,
        manifest: str = "",
        window_bytes: int | None = None,
        timeout_s: float | None = None,
    ) -> Transfer:
        """Send from this member to all others, which `receive` as many bytes in as many buffers.

        Buffers below 16 MiB are joined on their way, larger ones cut; the bytes of those must not change
        before the transfer has ended.

        Args:
            buffers: On the CPU for gloo, on the member's GPU for NCCL. What is not contiguous is copied.
            manifest: What they are, as a digest of names, shapes, dtypes and version: members compare it.
            window_bytes: How much is under way at a time; 64 MiB unless given.
            timeout_s: Deadline of the whole, the others' arrival included.

        The transfer fails with:
            GroupMismatchError: Members differ in the buffers' number, sizes or manifest; nothing was moved.
            PeerLostError: A member died or left.
            GroupTimeoutError: It did not end in time; it names those who did not take part.
            StaleGenerationError: The group has a later generation.
            GroupError: Another member could not go on, or the group was broken before.

        Raises:
            ValueError: At once: a buffer is on another device.
            UnsupportedTensorError: At once: a tensor has no plain bytes.
            TransportClosedError: The group is closed.
        """
        return self._begin("send", buffers, manifest, window_bytes, timeout_s)

    def receive(
        self,
        into: Sequence[Buffer],
        *,
        manifest: str = "",
        window_bytes: int | None = None,
        timeout_s: float | None = None,
    ) -> Transfer:
        """Take what another member sends, in buffers of the same number and sizes; fails as `send` does.

        Raises:
            ValueError: At once: a buffer is on another device, read-only or not contiguous.
            UnsupportedTensorError: At once: a tensor has no plain bytes.
            TransportClosedError: The group is closed.
        """
        return self._begin("receive", into, manifest, window_bytes, timeout_s)

    def close(self) -> None:
        """Leave the group. What is under way fails here, and with the others, at once; idempotent."""
        if self._is_parents:
            return
        with self._lock:
            if self._closed:
                return
            self._closed, live = True, list(self._live)
        party = self._party
        with ExitStack() as last:  # Also after an interrupt: the store of a host that is stopped waits long.
            for end in (party.board.close, self._lifeline.close, party.fabric.close, self._runner.close):
                last.callback(end)
            if live:
                last.callback(party.fabric.end, [])
            for transfer in live:
                last.callback(transfer.stop, self._closed_error)
            self._tell_left()

    def _begin(
        self,
        role: Literal["send", "receive"],
        buffers: Sequence[Buffer],
        manifest: str,
        window_bytes: int | None,
        timeout_s: float | None,
    ) -> Transfer:
        self._check_process()
        window = 2 * PIECE_BYTES if window_bytes is None else window_bytes
        if window <= 0 or (timeout_s is not None and not timeout_s > 0):
            raise ValueError(f"window_bytes and timeout_s are positive, not {window_bytes} and {timeout_s}")
        view, device = as_source if role == "send" else as_target, self._party.fabric.device
        views = [view(buffer, index, device) for index, buffer in enumerate(buffers)]
        wish = Wish.of(role, [each.numel() for each in views], manifest)
        what = f"{role} of {wish.size_bytes} bytes in {self._party.invitation.label}"
        transfer = Transfer(what, wish.size_bytes, timeout_s=timeout_s)
        with self._lock:
            if self._closed:
                raise self._closed_error()
            self._live.add(transfer)
            mark = self._party.fabric.mark()
            self._runner.submit(lambda: self._serve(transfer, wish, views, window, mark))
        return transfer

    def _serve(
        self, transfer: Transfer, wish: Wish, views: list[torch.Tensor], window: int, mark: object
    ) -> None:
        error: BaseException | None = None
        if not (begun := transfer.begin()):
            transfer.guard.stop()  # The others hear that it is given up, when its turn has come.
        try:
            self._operate(transfer.guard, wish, views, window, mark)
        except BaseException as found:  # noqa: BLE001 - whoever waits for the transfer gets it
            error = found
        if begun and wish.role == "receive":
            count_write(views)
        views.clear()
        with self._lock:
            self._live.discard(transfer)
        if begun:
            transfer.end(error)

    def _operate(
        self, guard: Guard, wish: Wish, views: list[torch.Tensor], window: int, mark: object
    ) -> None:
        self._check_usable()
        self._turn += 1
        try:
            guard.check()
        except TransportError:
            self._party.give_up(self._turn)
            raise
        try:
            root = self._party.agree(self._turn, wish, guard)
            with self._party.fabric.ordered(mark):
                self._party.move(root, views, window, guard, sends=wish.role == "send")
                self._party.settle(guard)
            self._party.confirm(self._turn, guard)
        except GroupMismatchError:
            raise
        except BaseException as error:
            raise self._broken(error, views) from error

    def _closed_error(self) -> TransportError:
        return TransportClosedError(f"{self._party.invitation.label} is closed")

    def _check_usable(self) -> None:
        if self._closed:
            raise self._closed_error()
        if (seen := self._failure) is not None:
            raise group_error(type(seen), self._party.invitation, str(seen), seen.members) from seen

    def _broken(self, error: BaseException, views: Sequence[torch.Tensor]) -> BaseException:
        """Note that nothing works any more, tell the others, and say what to raise here."""
        party, invitation = self._party, self._party.invitation
        party.fabric.end([], views)
        if self._closed:
            return TransportClosedError(f"{invitation.label} was closed meanwhile")
        if isinstance(error, RuntimeError):  # of gloo or NCCL
            error = party.watch.explain(error)
        try:
            seen = party.watch.blame(error)
        except TransportError as silent:
            log.warning("%s: could not tell the others of %r: %s", invitation.label, error, silent)
            seen = Cause.of(error, invitation.member).error(invitation)
        self._failure = seen
        return seen if isinstance(error, GroupError) else error

    def _tell_left(self) -> None:
        invitation = self._party.invitation
        message = f"{invitation.member} left {invitation.label}"
        try:
            self._party.board.blame(Cause("closed", message, (invitation.member,)))
        except TransportError as error:
            log.debug("%s, and the store is gone: %s", message, error)

    def _let_go(self) -> None:
        """A child can't use the connections, and holds none of what says that its parent is there."""
        for transfer in self._live:
            transfer.leave_to_parent()
        keep_for_ever(self._party)
        self._lifeline.close()

    def _foreign(self) -> str:
        return (
            f"{self._party.invitation.label} was joined by process {self._pid}, and process {os.getpid()} "
            "was forked from it: have it invited as a member of its own"
        )
